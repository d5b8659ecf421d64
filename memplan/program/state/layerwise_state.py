"""Stacks of layers in host memory, a layer at a time: slices that a scan reads, and updates of all their elements.

A stack that scans take slices of, and that is otherwise only updated element by element (an optimizer's work, with the
moments that go into it), never comes to the device whole: each trip of a scan has its slice fetched during the trip
before, and is updated in place in host memory. Where the gradients come out of one scan and nothing has to be known of
all of them first, each trip of that scan updates its layer, and no stack of gradients is made; its copies to and from
the host lie beside the next layer's gradient. Otherwise the update is a loop of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.program import compat, ops
from memplan.program.flat import Flat
from memplan.program.state.layerwise_scan import StreamedScan, Update, UpdatingScan


@dataclass(frozen=True)
class LayerwiseState:
    """What of a flat jaxpr is done layer by layer."""

    stacks: frozenset[Any]  # inputs in host memory that never come to the device whole
    in_place: Mapping[Any, Any]  # result of an update -> stack that it is written over
    # of the jaxpr, in their order; a scan with an update comes after the scalars that the update reads
    equations: tuple[compat.JaxprEqn | Update | StreamedScan | UpdatingScan, ...]


def layerwise_state(flat: Flat, on_host: Collection[Any], aliases: Mapping[Any, Any]) -> LayerwiseState:
    """What of a flat jaxpr can be done layer by layer.

    Args:
      on_host: variables of inputs in host memory.
      aliases: result of the program -> input in host memory whose buffer it takes.
    """
    return _Analysis(flat, on_host, aliases).state()


class _Analysis:
    def __init__(self, flat: Flat, on_host: Collection[Any], aliases: Mapping[Any, Any]):
        self.eqns, self.aliases = flat.eqns, aliases
        self.readers, self.returned = flat.readers, flat.returned
        self.scans = {number: scan for number, eqn in enumerate(self.eqns) if (scan := compat.scan_of(eqn))}
        sliced = {scan.trips for number, scan in self.scans.items() if self.sliced(number, on_host)}
        self.trips = sorted(trips for trips in sliced if trips > 1)
        layered = frozenset(var for var in on_host if var.aval.ndim and var.aval.shape[0] in self.trips)
        self.stacks, self.layerwise = self.only_layerwise(layered - self.returned)

    def state(self) -> LayerwiseState:
        updates = [update for trips in self.trips if (update := self.update(trips))]
        in_place = {result: stack for update in updates for result, stack in update.in_place.items()}
        return LayerwiseState(self.stacks, in_place, tuple(self.equations(updates)))

    def equations(self, updates: Sequence[Update]) -> Iterator[compat.JaxprEqn | Update | StreamedScan | UpdatingScan]:
        fused: dict[int, Update] = {}  # by the number of the scan
        alone: dict[int, Update] = {}  # by the number of the last equation
        before: dict[int, list[int]] = {}  # scan with an update -> equations that it waits for
        for update in updates:
            scan, earlier = self.scan_of(update), self.producers(update.scalars)
            if scan is None or scan in earlier or scan in fused:
                alone[update.numbers[-1]] = update
            else:
                fused[scan], before[scan] = update, earlier
        within = {number for update in updates for number in update.numbers}
        order = dict.fromkeys(n for last in range(len(self.eqns)) for n in (*before.get(last, ()), last))
        for number in order:
            eqn, stacks = self.eqns[number], self.host_operands(number)
            if number in alone:
                yield alone[number]
            elif number in fused:
                yield UpdatingScan(eqn, stacks, fused[number])
            elif number not in within:
                yield StreamedScan(eqn, stacks) if stacks else eqn

    def only_layerwise(self, stacks: frozenset[Any]) -> tuple[frozenset[Any], set[int]]:
        """Stacks that scans slice and the rest treats element by element; the equations that do."""
        while True:
            eqns, refused = self.consumers(stacks)
            if not refused:
                return stacks, self.with_producers(eqns)
            stacks -= refused

    def consumers(self, stacks: frozenset[Any]) -> tuple[set[int], frozenset[Any]]:
        """Elementwise equations behind the stacks, and the stacks behind anything else."""
        eqns: set[int] = set()
        behind: dict[Any, frozenset[Any]] = {var: frozenset({var}) for var in stacks}
        refused: frozenset[Any] = frozenset()
        for number, eqn in enumerate(self.eqns):
            touched = [atom for atom in eqn.invars if _is_in(atom, behind)]
            if not touched:
                continue
            if _is_layerwise(eqn):
                eqns.add(number)
                behind.update(dict.fromkeys(eqn.outvars, frozenset().union(*(behind[atom] for atom in touched))))
            elif number not in self.scans or not self.takes_slices(number, touched, stacks):
                refused = refused.union(*(behind[atom] for atom in touched))
        return eqns, refused

    def with_producers(self, eqns: set[int]) -> set[int]:
        """With the elementwise equations that only those read."""
        found = set(eqns)
        for number, eqn in reversed(list(enumerate(self.eqns))):
            made = [var for var in eqn.outvars if not isinstance(var, compat.DropVar)]
            is_free = number not in found and _is_layerwise(eqn) and not self.returned.intersection(made)
            if is_free and all(self.readers.get(var) and found.issuperset(self.readers[var]) for var in made):
                found.add(number)
        return found

    def takes_slices(self, number: int, touched: Sequence[Any], stacks: frozenset[Any]) -> bool:
        """Does a scan read the stacks as slices only?"""
        consts, carries, _ = self.scans[number].split(self.eqns[number].invars)
        return stacks.issuperset(touched) and not any(_is_in(atom, touched) for atom in (*consts, *carries))

    def host_operands(self, number: int) -> dict[int, Any]:
        """Operand position -> stack in host memory, of the scan that an equation is."""
        sliced = self.sliced(number, self.stacks) if number in self.scans else ()
        return {position: atom for position, atom in enumerate(self.eqns[number].invars) if _is_in(atom, sliced)}

    def sliced(self, number: int, among: Collection[Any]) -> list[Any]:
        """Variables that a scan takes slices of."""
        return [atom for atom in self.scans[number].split(self.eqns[number].invars)[2] if _is_in(atom, among)]

    def update(self, trips: int) -> Update | None:
        """Of all stacks of so many layers."""
        numbers = sorted(n for n in self.layerwise if compat.aval_of(self.eqns[n].outvars[0]).shape[0] == trips)
        if not numbers:
            return None
        eqns = tuple(self.eqns[number] for number in numbers)
        made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        read = [var for var in dict.fromkeys(filter(compat.is_var, _operands(eqns))) if var not in made]
        rest = [var for var in read if var not in self.stacks]
        results = tuple(var for var in made if var in self.returned)
        in_place = {var: self.aliases[var] for var in results if self.aliases.get(var) in self.stacks}
        return Update(
            tuple(numbers),
            eqns,
            trips,
            on_host=tuple(var for var in read if var in self.stacks),
            on_device=tuple(var for var in rest if compat.aval_of(var).ndim),
            scalars=tuple(var for var in read if not compat.aval_of(var).ndim),
            results=results,
            in_place=in_place,
        )

    def scan_of(self, update: Update) -> int | None:
        """The scan that stacks all that an update reads on the device, for nobody else; if all is written in place."""
        if not update.on_device or update.others:
            return None
        for number, scan in self.scans.items():
            stacked = self.eqns[number].outvars[scan.carries :]
            if scan.trips == update.trips and set(stacked).issuperset(update.on_device):
                found = set().union(*(self.readers[var] for var in update.on_device))
                is_alone = found.issubset(update.numbers) and self.returned.isdisjoint(update.on_device)
                return number if is_alone else None
        return None

    def producers(self, variables: Sequence[Any]) -> list[int]:
        """Equations that these are computed by, in order."""
        wanted, found = set(variables), []
        for number, eqn in reversed(list(enumerate(self.eqns))):
            if wanted.intersection(eqn.outvars):
                found.append(number)
                wanted.update(filter(compat.is_var, eqn.invars))
        return found[::-1]


def _operands(eqns: Sequence[compat.JaxprEqn]) -> Iterator[Any]:
    return (atom for eqn in eqns for atom in eqn.invars)


def _is_layerwise(eqn: compat.JaxprEqn) -> bool:
    """Does an equation compute every element of its results from the elements at its place, or from scalars?"""
    name, shape = eqn.primitive.name, getattr(compat.aval_of(eqn.outvars[0]), "shape", ()) if eqn.outvars else ()
    if eqn.effects or not shape or compat.sub_jaxprs(eqn):
        return False
    shapes = [getattr(compat.aval_of(atom), "shape", None) for atom in eqn.invars]
    if name == "broadcast_in_dim":
        return shapes == [()]
    alike = all(one in ((), shape) for one in shapes)
    same = all(getattr(compat.aval_of(var), "shape", None) == shape for var in eqn.outvars)
    return ops.of(eqn).fusion == "elementwise" and not ops.of(eqn).moves_elements and alike and same


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return compat.is_var(atom) and atom in variables
