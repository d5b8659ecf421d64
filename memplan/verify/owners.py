"""Whose elements are summed where: for each device, how often every device's elements are in its sum."""

from collections import Counter
from collections.abc import Iterable, Sequence

from memplan.hardware.machine import Groups

OWN = 0  # each device's own elements


class Owners:
    """Numbered: equal numbers for equal owners.

    Owners in groups are known for all groups at once, which may differ in nothing but their devices; for devices in
    groups of another size than a sum has terms there are none.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._bags: list[tuple[tuple[int, int], ...]] = []  # device and count
        self._bag_numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._owners: list[tuple[int, ...]] = []  # of each device: the number of a bag
        self._owner_numbers: dict[tuple[int, ...], int] = {}
        self._groups: dict[Groups, int] = {}
        self._sums: dict[tuple[int, ...], int] = {}
        self._fetched: dict[tuple[int, int, int], int] = {}
        self._over: dict[tuple[int, int], int] = {}
        self._number(self._bag([device]) for device in range(partitions))

    def everywhere_several(self, owners: int) -> bool:
        """Does each device have a sum over more than one device?"""
        return all(len(self._bags[bag]) > 1 for bag in self._owners[owners])

    def groups(self, groups: Groups) -> int:
        return self._groups.setdefault(groups, len(self._groups))

    def added(self, terms: tuple[int, ...]) -> int:
        """Of the sum of what each device has."""
        if terms not in self._sums:
            columns = zip(*(self._owners[one] for one in terms), strict=True)
            self._sums[terms] = self._number([self._merged(column) for column in columns])
        return self._sums[terms]

    def fetched(self, owners: int, groups: Groups, place: int) -> int:
        """Of what the group's member in this place has."""
        key = owners, self.groups(groups), place
        if key not in self._fetched:
            bags = [self._bag([])] * self._partitions
            for group in groups:
                for member in group:
                    bags[member] = self._owners[owners][group[place]] if place < len(group) else bags[member]
            self._fetched[key] = self._number(bags)
        return self._fetched[key]

    def over(self, owners: int, groups: Groups) -> int:
        """Of the sum of what all members of the group have."""
        key = owners, self.groups(groups)
        if key not in self._over:
            bags = [0] * self._partitions
            for group in groups:
                merged = self._merged([self._owners[owners][member] for member in group])
                for member in group:
                    bags[member] = merged
            self._over[key] = self._number(bags)
        return self._over[key]

    def _merged(self, bags: Iterable[int]) -> int:
        total = Counter[int]()
        for bag in bags:
            total.update(dict(self._bags[bag]))
        return self._bag(list(total.elements()))

    def _bag(self, devices: Sequence[int]) -> int:
        bag = tuple(sorted(Counter(devices).items()))
        if bag not in self._bag_numbers:
            self._bag_numbers[bag] = len(self._bags)
            self._bags.append(bag)
        return self._bag_numbers[bag]

    def _number(self, bags: Iterable[int]) -> int:
        owners = tuple(bags)
        if owners not in self._owner_numbers:
            self._owner_numbers[owners] = len(self._owners)
            self._owners.append(owners)
        return self._owner_numbers[owners]
