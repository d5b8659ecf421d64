"""Stacks of layers in host memory, streamed one layer at a time.

A stack that scans slice, and that the program otherwise only updates element by element (by an
optimizer, together with its moments), never comes to the device whole. A scan fetches each slice
one trip ahead, and the update writes each layer in place in host memory. If one scan makes the
gradients, and no layer's update needs all gradients, every trip of that scan updates its layer.
Then no stack of gradients is made, and the copies to and from the host overlap with the next
layer's gradient. Otherwise the update is a loop of its own.
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
    in_place: Mapping[Any, Any]  # result of an update -> stack that it overwrites
    # the jaxpr's equations, in order; a scan with an update comes after the scalars that the update
    # reads
    equations: tuple[compat.JaxprEqn | Update | StreamedScan | UpdatingScan, ...]


def layerwise_state(
    flat: Flat,
    on_host: Collection[Any],
    aliases: Mapping[Any, Any],
) -> LayerwiseState:
    """Find the part of a flat jaxpr that can run layer by layer.

    Args:
      on_host: variables of inputs in host memory.
      aliases: result of the program -> input in host memory whose buffer it takes.
    """
    return _Analysis(flat, on_host, aliases).state()


class _Analysis:
    """Finds stacks and the equations that can run layer by layer.

    Attributes:
      scans: number of an equation -> its scan.
      trips: numbers of trips of the scans that slice inputs in host memory.
      stacks: inputs in host memory that never come to the device whole.
      layerwise: numbers of the elementwise equations that run layer by layer.
    """

    def __init__(self, flat: Flat, on_host: Collection[Any], aliases: Mapping[Any, Any]):
        self.eqns = flat.eqns
        self.aliases = aliases
        self.readers = flat.readers
        self.returned = flat.returned
        scans = {number: compat.scan_of(eqn) for number, eqn in enumerate(self.eqns)}
        self.scans = {number: scan for number, scan in scans.items() if scan}
        sliced = {scan.trips for number, scan in self.scans.items() if self.sliced(number, on_host)}
        self.trips = sorted(trips for trips in sliced if trips > 1)
        arrays = [var for var in on_host if var.aval.ndim]
        layered = frozenset(var for var in arrays if var.aval.shape[0] in self.trips)
        self.stacks, self.layerwise = self.only_layerwise(layered - self.returned)

    def state(self) -> LayerwiseState:
        updates = [update for trips in self.trips if (update := self.update(trips))]
        in_place = dict[Any, Any]()
        for update in updates:
            in_place.update(update.in_place)
        return LayerwiseState(self.stacks, in_place, tuple(self.equations(updates)))

    def equations(
        self,
        updates: Sequence[Update],
    ) -> Iterator[compat.JaxprEqn | Update | StreamedScan | UpdatingScan]:
        """Yield the jaxpr's equations, with updates in place of those that they replace."""
        fused: dict[int, Update] = {}  # number of a scan -> the update that it does
        separate: dict[int, Update] = {}  # number of an update's last equation -> the update
        awaited: dict[int, list[int]] = {}  # number of a scan -> equations that its update needs
        for update in updates:
            scan = self.scan_of(update)
            producers = self.producers(update.scalars)
            if scan is None or scan in producers or scan in fused:
                separate[update.numbers[-1]] = update
            else:
                fused[scan] = update
                awaited[scan] = producers

        replaced = {number for update in updates for number in update.numbers}
        order = dict[int, None]()
        for number, _ in enumerate(self.eqns):
            order.update(dict.fromkeys((*awaited.get(number, ()), number)))
        for number in order:
            eqn = self.eqns[number]
            stacks = self.host_operands(number)
            if number in separate:
                yield separate[number]
            elif number in fused:
                yield UpdatingScan(eqn, stacks, fused[number])
            elif number not in replaced:
                yield StreamedScan(eqn, stacks) if stacks else eqn

    def only_layerwise(self, stacks: frozenset[Any]) -> tuple[frozenset[Any], set[int]]:
        """The stacks that are only sliced by scans and treated element by element.

        Returns:
          The stacks, and the numbers of the elementwise equations.
        """
        while True:
            eqns, refused = self.consumers(stacks)
            if not refused:
                return stacks, self.with_producers(eqns)
            stacks -= refused

    def consumers(self, stacks: frozenset[Any]) -> tuple[set[int], frozenset[Any]]:
        """Elementwise equations that depend on stacks, and stacks on which others depend."""
        eqns: set[int] = set()
        refused: frozenset[Any] = frozenset()
        # variable -> the stacks on which it depends
        sources: dict[Any, frozenset[Any]] = {var: frozenset({var}) for var in stacks}
        for number, eqn in enumerate(self.eqns):
            dependent = [atom for atom in eqn.invars if _is_in(atom, sources)]
            if not dependent:
                continue
            sources_of_eqn = frozenset[Any]().union(*(sources[atom] for atom in dependent))
            if _is_layerwise(eqn):
                eqns.add(number)
                sources.update(dict.fromkeys(eqn.outvars, sources_of_eqn))
            elif number not in self.scans or not self.takes_slices(number, dependent, stacks):
                refused |= sources_of_eqn
        return eqns, refused

    def with_producers(self, eqns: set[int]) -> set[int]:
        """The equations, and the elementwise ones that only they read."""
        numbers = set(eqns)
        for number, eqn in reversed(list(enumerate(self.eqns))):
            results = [var for var in eqn.outvars if not isinstance(var, compat.DropVar)]
            if number in numbers or not _is_layerwise(eqn) or self.returned.intersection(results):
                continue
            readers = [self.readers.get(var, set()) for var in results]
            if all(read_by and numbers.issuperset(read_by) for read_by in readers):
                numbers.add(number)
        return numbers

    def takes_slices(self, number: int, operands: Sequence[Any], stacks: frozenset[Any]) -> bool:
        """Are these operands of a scan stacks that it only slices?"""
        consts, carries, _ = self.scans[number].split(self.eqns[number].invars)
        is_whole = any(_is_in(atom, operands) for atom in (*consts, *carries))
        return stacks.issuperset(operands) and not is_whole

    def host_operands(self, number: int) -> dict[int, Any]:
        """Operand position -> stack in host memory, of the scan that an equation is."""
        sliced = self.sliced(number, self.stacks) if number in self.scans else ()
        operands = enumerate(self.eqns[number].invars)
        return {position: atom for position, atom in operands if _is_in(atom, sliced)}

    def sliced(self, number: int, variables: Collection[Any]) -> list[Any]:
        """The variables that a scan slices."""
        _, _, stacks = self.scans[number].split(self.eqns[number].invars)
        return [atom for atom in stacks if _is_in(atom, variables)]

    def update(self, trips: int) -> Update | None:
        """The update of all stacks with this number of layers."""
        numbers = list[int]()
        for number in sorted(self.layerwise):
            shape = _shape_of(self.eqns[number].outvars[0])
            if shape and shape[0] == trips:
                numbers.append(number)
        if not numbers:
            return None
        eqns = tuple(self.eqns[number] for number in numbers)
        computed = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        operands = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if compat.is_var(atom))
        read = [var for var in operands if var not in computed]
        not_on_host = [var for var in read if var not in self.stacks]
        results = tuple(var for var in computed if var in self.returned)
        aliases = {var: self.aliases[var] for var in results if var in self.aliases}
        in_place = {var: stack for var, stack in aliases.items() if stack in self.stacks}
        return Update(
            tuple(numbers),
            eqns,
            trips,
            on_host=tuple(var for var in read if var in self.stacks),
            on_device=tuple(var for var in not_on_host if compat.aval_of(var).ndim),
            scalars=tuple(var for var in read if not compat.aval_of(var).ndim),
            results=results,
            in_place=in_place,
        )

    def scan_of(self, update: Update) -> int | None:
        """The scan whose stacks only this update reads, if the update is fully in place."""
        if not update.on_device or update.stacked:
            return None
        for number, scan in self.scans.items():
            outputs = self.eqns[number].outvars[scan.carries :]
            if scan.trips == update.trips and set(outputs).issuperset(update.on_device):
                readers = set().union(*(self.readers[var] for var in update.on_device))
                is_only_reader = readers.issubset(update.numbers)
                are_returned = not self.returned.isdisjoint(update.on_device)
                return number if is_only_reader and not are_returned else None
        return None

    def producers(self, variables: Sequence[Any]) -> list[int]:
        """Numbers of the equations that compute these variables, in order."""
        needed = set(variables)
        numbers = list[int]()
        for number, eqn in reversed(list(enumerate(self.eqns))):
            if needed.intersection(eqn.outvars):
                numbers.append(number)
                needed.update(filter(compat.is_var, eqn.invars))
        return numbers[::-1]


def _is_layerwise(eqn: compat.JaxprEqn) -> bool:
    """Does every element of the results depend only on scalars and elements at the same index?"""
    if eqn.effects or not eqn.outvars or compat.sub_jaxprs(eqn):
        return False
    shape = _shape_of(eqn.outvars[0])
    if not shape:
        return False
    operand_shapes = [_shape_of(atom) for atom in eqn.invars]
    if eqn.primitive.name == "broadcast_in_dim":
        return operand_shapes == [()]
    record = ops.of(eqn)
    return (
        record.fusion == "elementwise"
        and not record.moves_elements
        and all(operand_shape in ((), shape) for operand_shape in operand_shapes)
        and all(_shape_of(var) == shape for var in eqn.outvars)
    )


def _shape_of(atom: Any) -> tuple[int, ...] | None:
    """The shape of an array; None for a token or reference."""
    return getattr(compat.aval_of(atom), "shape", None)


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return compat.is_var(atom) and atom in variables


@dataclass(frozen=True)
class Update:
    """Elementwise equations on whole stacks, run layer by layer in a loop of their own."""

    numbers: tuple[int, ...]  # of the equations; the loop runs where the last one stands
    eqns: tuple[compat.JaxprEqn, ...]  # in order
    trips: int  # layers
    on_host: tuple[Any, ...]  # stacks in host memory that they read
    on_device: tuple[Any, ...]  # stacks on the device that they read
    scalars: tuple[Any, ...]  # scalars that they read
    results: tuple[Any, ...]  # results that the program returns
    in_place: Mapping[Any, Any]  # result -> the stack in host memory that it overwrites

    @property
    def invars(self) -> list[Any]:
        variables = [*self.on_host, *self.on_device, *self.scalars, *self.in_place.values()]
        return list(dict.fromkeys(variables))

    @property
    def stacked(self) -> list[Any]:
        """Results that are stacked on the device."""
        return [result for result in self.results if result not in self.in_place]

    @property
    def outvars(self) -> list[Any]:
        return [*self.in_place, *self.stacked]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.invars, operands, strict=True))

        def trip(
            carry: tuple[Any, list[Any]],
            device_slices: list[Any],
        ) -> tuple[tuple[Any, list[Any]], list[Any]]:
            layer, buffers = carry
            stacks = {**env, **dict(zip(self.in_place.values(), buffers, strict=True))}
            slices = dict(zip(self.on_device, device_slices, strict=True))
            slices |= {var: fetch(stacks[var], layer) for var in self.on_host}
            results = self.of_layer(env, slices)
            buffers = write(buffers, [results[var] for var in self.in_place], layer)
            return (layer + 1, buffers), [results[var] for var in self.stacked]

        carry = jax.numpy.int32(0), [env[stack] for stack in self.in_place.values()]
        device_stacks = [env[var] for var in self.on_device]
        (_, buffers), stacked = jax.lax.scan(trip, carry, device_stacks, length=self.trips)
        return [*buffers, *stacked]

    def of_layer(self, env: Mapping[Any, Any], slices: Mapping[Any, Any]) -> dict[Any, Any]:
        """The results for one layer, from its slices of all stacks."""
        bound = {**{var: env[var] for var in self.scalars}, **slices}
        values = interpret_eqns(self.eqns, bound, self.results, _bind_on_layer)
        return dict(zip(self.results, values, strict=True))


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
        scan = _scan(self.eqn)
        consts, carries, _ = scan.split(operands)
        host_stacks = {var: operands[position] for position, var in self.stacks.items()}
        device_stacks = _device_stacks(self.eqn, self.stacks, operands)

        def trip(carry: Any, x: Any) -> Any:
            carried, fetched = carry
            following, device_slices = x
            layer_slices = dict(zip(host_stacks, fetched, strict=True))
            slices = _scan_slices(self.eqn, self.stacks, layer_slices, device_slices)
            results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *slices)
            fetched = [fetch(stack, following) for stack in host_stacks.values()]
            return (results[: len(carries)], fetched), results[len(carries) :]

        start = scan.trips - 1 if scan.reverse else 0
        fetched = [fetch(stack, start) for stack in host_stacks.values()]
        xs = scan.following, device_stacks
        (carried, _), stacked = scan.loop(trip, (carries, fetched), xs)
        return [*carried, *stacked]


@dataclass(frozen=True)
class UpdatingScan:
    """A scan that makes gradients layer by layer, and whose trips update their layers.

    A trip writes back the previous layer, then prefetches the next one from the same stacks; in
    this order, XLA writes in place. Both copies are independent of the trip's computation. Without
    such a scan, the gradients of all layers are stacked on the device: a scanned decoder whose
    state is on the host takes 14,873 MiB instead of 6,736 (`bench state`'s v100-3072-b1-scan,
    compiled).
    """

    eqn: compat.JaxprEqn
    stacks: Mapping[int, Any]  # operand position -> stack in host memory that the scan reads
    # all its results are in place; the stacks on the device that it reads are the scan's outputs,
    # which nothing else reads
    update: Update

    @property
    def invars(self) -> list[Any]:
        update = self.update
        return [*self.eqn.invars, *update.on_host, *update.scalars, *update.in_place.values()]

    @property
    def _prefetched(self) -> list[Any]:
        """Stacks of which the scan needs slices at the beginning of a trip.

        Only the update, at the end of a trip, needs slices of the others.
        """
        return list(dict.fromkeys(self.stacks.values()))

    @property
    def stacked(self) -> list[Any]:
        """Results that the scan stacks and its update does not read."""
        outputs = self.eqn.outvars[_scan(self.eqn).carries :]
        return [var for var in outputs if var not in self.update.on_device]

    @property
    def outvars(self) -> list[Any]:
        carries = self.eqn.outvars[: _scan(self.eqn).carries]
        return [*carries, *self.stacked, *self.update.in_place]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        eqn = self.eqn
        update = self.update
        scan = _scan(eqn)
        values = zip(self.invars, operands, strict=True)
        env = {atom: value for atom, value in values if compat.is_var(atom)}
        consts, carries, _ = scan.split(operands[: len(eqn.invars)])
        device_stacks = _device_stacks(self.eqn, self.stacks, operands)
        prefetched_vars = self._prefetched
        update_vars = [var for var in update.on_host if var not in prefetched_vars]
        outputs = eqn.outvars[len(carries) :]

        def trip(carry: Any, x: Any) -> Any:
            trip_number, carried, buffers, previous_results, prefetched = carry
            following, previous, device_slices = x
            layer = scan.trips - 1 - trip_number if scan.reverse else trip_number

            # Write back the previous layer, then prefetch the next one.
            buffers = write(buffers, previous_results, previous)
            stacks = {**env, **dict(zip(update.in_place.values(), buffers, strict=True))}
            next_prefetched = [fetch(stacks[var], following) for var in prefetched_vars]

            # Run the scan's own trip.
            layer_slices = {var: fetch(stacks[var], layer) for var in update_vars}
            layer_slices |= dict(zip(prefetched_vars, prefetched, strict=True))
            slices = _scan_slices(eqn, self.stacks, layer_slices, device_slices)
            results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *slices)

            # Update the layer; the next trip writes it back.
            layer_slices |= dict(zip(outputs, results[len(carries) :], strict=True))
            updated = update.of_layer(env, layer_slices)
            new_results = [updated[result] for result in update.in_place]
            carry = trip_number + 1, results[: len(carries)], buffers, new_results, next_prefetched
            return carry, [layer_slices[var] for var in self.stacked]

        start, end = (scan.trips - 1, 0) if scan.reverse else (0, scan.trips - 1)
        buffers = [env[stack] for stack in update.in_place.values()]
        # The first trip has no previous layer: it writes back its own layer, unchanged.
        unchanged = [fetch(stack, start) for stack in buffers]
        prefetched = [fetch(env[var], start) for var in prefetched_vars]
        carry = jax.numpy.int32(0), carries, buffers, unchanged, prefetched
        previous = _previous_layers(scan)
        xs = scan.following, previous, device_stacks
        (_, carried, buffers, last_results, _), stacked = scan.loop(trip, carry, xs)
        return [*carried, *stacked, *write(buffers, last_results, end)]


def _previous_layers(scan: compat.Scan) -> Any:
    """For each layer, that of the trip before; the first trip has its own."""
    layers = jax.numpy.arange(scan.trips)
    if scan.reverse:
        return jax.numpy.minimum(layers + 1, scan.trips - 1)
    return jax.numpy.maximum(layers - 1, 0)


def _device_stacks(
    eqn: compat.JaxprEqn,
    stacks: Mapping[int, Any],
    operands: Sequence[Any],
) -> list[Any]:
    """The stacks on the device that a scan slices, in order.

    Args:
      stacks: operand position -> stack in host memory.
    """
    scan = _scan(eqn)
    positions = range(scan.consts + scan.carries, len(eqn.invars))
    return [operands[position] for position in positions if position not in stacks]


def _scan_slices(
    eqn: compat.JaxprEqn,
    stacks: Mapping[int, Any],
    layer_slices: Mapping[Any, Any],
    device_slices: Sequence[Any],
) -> list[Any]:
    """The slices that a scan's body takes, in order.

    Args:
      stacks: operand position -> stack in host memory.
      layer_slices: stack in host memory -> its slice.
      device_slices: slices of the stacks on the device, in order.
    """
    scan = _scan(eqn)
    next_device = iter(device_slices)
    return [
        layer_slices[stacks[position]] if position in stacks else next(next_device)
        for position in range(scan.consts + scan.carries, len(eqn.invars))
    ]


def _bind_on_layer(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A layerwise equation on one layer."""
    if eqn.primitive.name == "broadcast_in_dim":
        shape = compat.aval_of(eqn.outvars[0]).shape[1:]
        return [jax.numpy.broadcast_to(operands[0], shape)]
    return compat.bind(eqn, operands)


def _scan(eqn: compat.JaxprEqn) -> compat.Scan:
    scan = compat.scan_of(eqn)
    assert scan is not None
    return scan
