"""Integers that follow from the number of a partition alone: where each device's piece of an array begins."""

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from memplan.verify.owners import OWN
from memplan.verify.rows import ZERO
from memplan.verify.spreads import Operation, Spread, Spreads

Table = tuple[tuple[int, ...], ...]  # for each device: the elements of a value

_LARGEST = 1 << 12  # of a table, in elements
_PAIRS: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "shift-right-logical": operator.rshift,
    "divide": operator.floordiv,
    "remainder": operator.mod,
}
_NATURAL = frozenset({"and", "shift-right-logical", "divide", "remainder"})  # only of natural numbers as in Python
_DIVIDING = frozenset({"divide", "remainder"})
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_DIRECTION = re.compile(r"direction=(\w+)")
_INTEGERS = re.compile(r"[su]\d+\[|pred\[")
_INTEGER = re.compile(r"-?\d+")


class PartitionOffsets:
    """The integers that values of `Spreads` are."""

    def __init__(self, spreads: Spreads) -> None:
        self._spreads = spreads
        self._known: dict[int, Table | None] = {}

    def table(self, value: int) -> Table | None:
        """The elements on each device; None where they depend on more than its number."""
        if value not in self._known:
            self._known[value] = None
            if self._spreads.sizes[value] <= _LARGEST:
                self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: int) -> Table | None:
        key = self._spreads.keys[value]
        if isinstance(key, Spread):
            return self._of_segments(key)
        if not isinstance(key, Operation) or not _INTEGERS.match(key.shape):
            return None
        made = self._made(key, self._spreads.sizes[value])
        return made if made is not None and all(_fits(key.shape, one) for row in made for one in row) else None

    def _of_segments(self, spread: Spread) -> Table | None:
        """Of pieces that each device has of its own values."""
        found: list[tuple[int, ...]] = []
        for device, row in enumerate(self._spreads.rows(spread)):
            tables = [None if one.source == ZERO else self.table(one.source) for one in row]
            if spread.wire is not None or any(one.owners != OWN or one.rounded for one in row) or None in tables:
                return None
            pairs = zip(row, (table for table in tables if table is not None), strict=True)
            parts = (table[device][one.start : one.start + one.length] for one, table in pairs)
            found.append(tuple(itertools.chain(*parts)))
        return tuple(found)

    def _made(self, made: Operation, size: int) -> Table | None:
        if made.opcode == "partition-id":
            return tuple((device,) for device in range(self._spreads.partitions))
        if made.opcode == "constant":
            numbers = tuple(map(int, _INTEGER.findall(made.attributes)))
            return (numbers,) * self._spreads.partitions if len(numbers) == size else None
        given = [table for _, values in made.operands if (table := self.table(values[0])) is not None]
        if not given or len(given) != len(made.operands):
            return None
        rows = [_on_one_device(made, size, row) for row in zip(*given, strict=True)]
        known = tuple(row for row in rows if row is not None)
        return known if len(known) == len(rows) else None


def _on_one_device(made: Operation, size: int, given: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The elements of a result from those of its operands."""
    if made.opcode in ("convert", "copy"):
        return given[0]
    if made.opcode == "broadcast":
        return given[0] * size if len(given[0]) == 1 else None
    if made.opcode == "dynamic-slice" and len(given) == 2:
        table, (start,) = given
        start = max(0, min(start, len(table) - size))
        return table[start : start + size]
    if any(len(one) != size for one in given):
        return None
    return _elementwise(made, given)


def _elementwise(made: Operation, given: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    columns = list(zip(*given, strict=True))
    if made.opcode in _PAIRS:
        if made.opcode in _NATURAL and any(min(one) < 0 for one in columns):
            return None
        if made.opcode in _DIVIDING and any(not second for _, second in columns):
            return None
        return tuple(_PAIRS[made.opcode](first, second) for first, second in columns)
    if made.opcode == "clamp":
        return tuple(min(max(low, one), high) for low, one, high in columns)
    if made.opcode == "select":
        return tuple(yes if chosen else no for chosen, yes, no in columns)
    if made.opcode == "compare" and (direction := _DIRECTION.search(made.attributes)):
        return tuple(int(_COMPARED[direction[1]](first, second)) for first, second in columns)
    return None


def _fits(shape: str, value: int) -> bool:
    """Is it an integer of this type, below those at which 32 bits overflow?"""
    least = -(1 << 31) if shape.startswith(("s32", "s64")) else 0
    most = {"pred": 2, "u8": 1 << 8, "u16": 1 << 16}.get(shape.partition("[")[0], 1 << 31)
    return least <= value < most
