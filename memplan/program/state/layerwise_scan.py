"""Scans over stacks of layers in host memory: they fetch the next trip's slices, and update a layer in place.

Each stands in for equations of a flat jaxpr (`program.interpret.Equation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.program import compat
from memplan.program.host_memory import fetch, write
from memplan.program.interpret import interpret_eqns


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
        """What the scan stacks, and its update does not read."""
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
