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

import jax

from memplan.program import compat, ops
from memplan.program.flat import Flat
from memplan.program.host_memory import fetch, write
from memplan.program.interpret import interpret_eqns


@dataclass(frozen=True)
class LayerwiseState:
    """The part of a flat jaxpr that runs layer by layer."""

    stacks: frozenset[Any]  # inputs in host memory that never come to the device whole
    in_place: Mapping[Any, Any]  # result of an update -> stack that it is written over
    # of the jaxpr, in their order; a scan with an update comes after the scalars that the update reads
    equations: tuple[compat.JaxprEqn | Update | StreamedScan | UpdatingScan, ...]


def layerwise_state(flat: Flat, on_host: Collection[Any], aliases: Mapping[Any, Any]) -> LayerwiseState:
    """Find the part of a flat jaxpr that can run layer by layer.

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
        """The update of all stacks with this number of layers."""
        numbers = sorted(n for n in self.layerwise if compat.aval_of(self.eqns[n].outvars[0]).shape[0] == trips)
        if not numbers:
            return None
        eqns = tuple(self.eqns[number] for number in numbers)
        made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        operands = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if compat.is_var(atom))
        read = [var for var in operands if var not in made]
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


@dataclass(frozen=True)
class Update:
    """Elementwise equations on whole stacks, run layer by layer in a loop of their own."""

    # numbers, eqns: in the jaxpr, in order; they run where the last one stands
    numbers: tuple[int, ...]
    eqns: tuple[compat.JaxprEqn, ...]
    trips: int  # layers
    # on_host, on_device: stacks that they read
    on_host: tuple[Any, ...]
    on_device: tuple[Any, ...]
    scalars: tuple[Any, ...]  # that they read
    results: tuple[Any, ...]  # that the program returns
    # result -> the stack in host memory that it is written over; results on the device are in none
    in_place: Mapping[Any, Any]

    @property
    def invars(self) -> list[Any]:
        return list(dict.fromkeys([*self.on_host, *self.on_device, *self.scalars, *self.in_place.values()]))

    @property
    def others(self) -> list[Any]:
        """Results that are stacked on the device."""
        return [result for result in self.results if result not in self.in_place]

    @property
    def outvars(self) -> list[Any]:
        return [*self.in_place, *self.others]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.invars, operands, strict=True))

        def trip(carry: tuple[Any, list[Any]], on_device: list[Any]) -> tuple[tuple[Any, list[Any]], list[Any]]:
            layer, buffers = carry
            stacks = {**env, **dict(zip(self.in_place.values(), buffers, strict=True))}
            known = dict(zip(self.on_device, on_device, strict=True))
            known |= {var: fetch(stacks[var], layer) for var in self.on_host}
            new = self.of_layer(env, known)
            buffers = write(buffers, [new[var] for var in self.in_place], layer)
            return (layer + 1, buffers), [new[var] for var in self.others]

        begin = jax.numpy.int32(0), [env[stack] for stack in self.in_place.values()]
        stacked = [env[var] for var in self.on_device]
        (_, buffers), made = jax.lax.scan(trip, begin, stacked, length=self.trips)
        return [*buffers, *made]

    def of_layer(self, env: Mapping[Any, Any], slices: Mapping[Any, Any]) -> dict[Any, Any]:
        """The results for one layer, from its slices of all stacks."""
        known = {**{var: env[var] for var in self.scalars}, **slices}
        return dict(zip(self.results, interpret_eqns(self.eqns, known, self.results, _bind_on_layer), strict=True))


@dataclass(frozen=True)
class StreamedScan:
    """A scan that reads slices of stacks in host memory, each fetched a trip ahead."""

    eqn: compat.JaxprEqn
    stacks: Mapping[int, Any]  # operand position -> stack

    @property
    def invars(self) -> Sequence[Any]:
        return self.eqn.invars

    @property
    def outvars(self) -> Sequence[Any]:
        return self.eqn.outvars

    def run(self, operands: Sequence[Any]) -> list[Any]:
        scan, stacks = _scan(self.eqn), self.stacks
        consts, carries, sliced = scan.split(operands)
        first = len(consts) + len(carries)
        distinct = {var: operands[position] for position, var in stacks.items()}
        number = {var: number for number, var in enumerate(distinct)}
        on_device = [stack for p, stack in enumerate(sliced, first) if p not in stacks]

        def body(carry: Any, slices: Any) -> Any:
            carried, arrived = carry
            following, on_device = slices
            rest = iter(on_device)
            own = [arrived[number[stacks[p]]] if p in stacks else next(rest) for p in range(first, len(operands))]
            results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *own)
            coming = [fetch(stack, following) for stack in distinct.values()]
            return (results[: len(carries)], coming), results[len(carries) :]

        begin = [fetch(stack, scan.trips - 1 if scan.reverse else 0) for stack in distinct.values()]
        (carried, _), made = jax.lax.scan(
            body, (carries, begin), (scan.following, on_device), length=scan.trips, reverse=scan.reverse,
            unroll=scan.unroll,
        )  # fmt: skip
        return [*carried, *made]


@dataclass(frozen=True)
class UpdatingScan:
    """A scan that updates in every trip the layer whose gradients it makes.

    A trip writes the layer of the trip before, then fetches from the same stacks, so that XLA writes in place; neither
    has anything to do with what the trip computes. Without this, all gradients are stacked on the device: a scanned
    decoder whose state is on the host takes 14,873 MiB instead of 6,736 (`bench state`'s v100-3072-b1-scan, compiled).
    """

    eqn: compat.JaxprEqn
    stacks: Mapping[int, Any]  # operand position -> stack in host memory that the scan reads
    # of results that all are written in place; what it reads on the device, the scan stacks for nobody else
    update: Update

    @property
    def invars(self) -> list[Any]:
        update = self.update
        return [*self.eqn.invars, *update.on_host, *update.scalars, *update.in_place.values()]

    @property
    def others(self) -> list[Any]:
        """Results that the scan stacks and its update does not read."""
        return [var for var in self.eqn.outvars[_scan(self.eqn).carries :] if var not in self.update.on_device]

    @property
    def outvars(self) -> list[Any]:
        return [*self.eqn.outvars[: _scan(self.eqn).carries], *self.others, *self.update.in_place]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        eqn, stacks, update, scan, others = self.eqn, self.stacks, self.update, _scan(self.eqn), self.others
        env = {atom: value for atom, value in zip(self.invars, operands, strict=True) if compat.is_var(atom)}
        consts, carries, sliced = scan.split(operands[: len(eqn.invars)])
        first = len(consts) + len(carries)
        near = [operand for p, operand in enumerate(sliced, first) if p not in stacks]
        ahead = list(dict.fromkeys(stacks.values()))
        late = [var for var in update.on_host if var not in ahead]
        made = eqn.outvars[len(carries) :]

        def body(carry: Any, x: Any) -> Any:
            (trip, carried, buffers, finished, arrived), (following, before, near) = carry, x
            layer = scan.trips - 1 - trip if scan.reverse else trip
            buffers = write(buffers, finished, before)
            there = {**env, **dict(zip(update.in_place.values(), buffers, strict=True))}
            coming = [fetch(there[var], following) for var in ahead]
            slices = {var: fetch(there[var], layer) for var in late} | dict(zip(ahead, arrived, strict=True))
            rest = iter(near)
            own = [slices[stacks[p]] if p in stacks else next(rest) for p in range(first, len(eqn.invars))]
            results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *own)
            slices |= dict(zip(made, results[len(carries) :], strict=True))
            new = update.of_layer(env, slices)
            state = trip + 1, results[: len(carries)], buffers, [new[result] for result in update.in_place], coming
            return state, [slices[var] for var in others]

        start, end = (scan.trips - 1, 0) if scan.reverse else (0, scan.trips - 1)
        buffers = [env[stack] for stack in update.in_place.values()]
        finished, arrived = [fetch(stack, start) for stack in buffers], [fetch(env[var], start) for var in ahead]
        begin = jax.numpy.int32(0), carries, buffers, finished, arrived
        layers = jax.numpy.arange(scan.trips)
        before = jax.numpy.minimum(layers + 1, start) if scan.reverse else jax.numpy.maximum(layers - 1, start)
        (_, carried, buffers, finished, _), stacked = jax.lax.scan(
            body, begin, (scan.following, before, near), length=scan.trips, reverse=scan.reverse,
            unroll=scan.unroll,
        )  # fmt: skip
        return [*carried, *stacked, *write(buffers, finished, end)]


def _bind_on_layer(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A layerwise equation on one layer."""
    if eqn.primitive.name == "broadcast_in_dim":
        return [jax.numpy.broadcast_to(operands[0], compat.aval_of(eqn.outvars[0]).shape[1:])]
    return compat.bind(eqn, operands)


def _scan(eqn: compat.JaxprEqn) -> compat.Scan:
    scan = compat.scan_of(eqn)
    assert scan is not None
    return scan
