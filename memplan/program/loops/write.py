"""Write a pair of loops with other residuals: its bodies, and the loops over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.planning.loops import Loop, Residuals, recomputed_ops
from memplan.program import compat
from memplan.program.host_memory import HostArray
from memplan.program.interpret import bindings, interpret_eqns
from memplan.program.loops.pairs import LoopPair


@dataclass
class WrittenPair:
    """A pair of loops, written with residuals.

    The first trips of the forward loop may be in segments: it keeps of a segment what is carried into it, the snapshot;
    the backward loop runs the segment again from there, now with its residuals, before it runs the segment's own trips.
    The residuals of all other trips are stacked by the forward loop. Trips in segments are counted by position, in the
    order of the forward loop; slices are read from, and results written into, whole stacks, so that no segment copies
    its part of them.

    The forward body returns the new residuals after its own results; the backward body takes them, and the constants
    and slices of the forward loop, after its own operands.
    """

    pair: LoopPair
    forward: compat.Scan
    backward: compat.Scan
    loop: Loop
    residuals: Residuals
    forward_body: compat.ClosedJaxpr = field(init=False)
    backward_body: compat.ClosedJaxpr = field(init=False)
    # What the forward loop leaves for the backward one: its constants and stacks, snapshots, and stacked residuals.
    given: tuple[list[Any], list[Any]] = field(init=False)
    snapshots: list[Any] = field(init=False)
    stacked: list[Any] = field(init=False)

    def write(self, within: Callable[[compat.ClosedJaxpr], compat.ClosedJaxpr]) -> None:
        """Trace the new bodies; `within` flattens them, and rewrites the loops inside."""
        inputs = [compat.as_struct(var.aval) for var in self.pair.body.invars]
        residuals = [compat.as_struct(self._var(value).aval) for value in self.residuals.stacked]
        consts, _, slices = self.forward.split(inputs)
        theirs = [compat.as_struct(var.aval) for var in self.backward.body.jaxpr.invars]
        own_consts, own_carries, own_slices = self.backward.split(theirs)
        kept = self._not_taken(own_slices)
        self.forward_body = within(jax.make_jaxpr(self._stack)(*inputs))
        traced = jax.make_jaxpr(self._recompute)(consts, own_consts, own_carries, kept, slices, residuals)
        self.backward_body = within(traced)

    def run_forward(self, operands: Sequence[Any]) -> list[Any]:
        """Replaces the forward equation; stacks that are gone are None."""
        consts, carried, stacks = self.forward.split(operands)
        self.given = consts, stacks
        if self.residuals.segments:
            made = self._empty_stacks(self.forward_body.out_avals[self.forward.carries : self._own_results])
            carried, made = self._sweep(carried, made)
            first = self.residuals.segmented_trips
            carried, made, self.stacked = self._run_again(first, self.forward.trips - first, carried, made)
        else:
            carried, made = self._run_forward(carried)
        left = iter(made)
        count = len(made) + len(self.pair.stacks)
        return [*carried, *(None if number in self.pair.stacks else next(left) for number in range(count))]

    def run_backward(self, operands: Sequence[Any]) -> list[Any]:
        """Replaces the backward equation."""
        consts, carried, own = self.backward.split(operands)
        own = self._not_taken(own)
        if not self.residuals.segments:
            return self._run_backward(consts, carried, own)
        made = self._empty_stacks(self.backward_body.out_avals[self.backward.carries :])
        length, first = self.residuals.segment_trips, self.residuals.segmented_trips
        state = self._run_back(first, self.forward.trips - first, consts, own, self.stacked, (carried, made))

        def segment(number: Any, state: Any, snapshot: list[Any]) -> Any:
            *_, stacked = self._run_again(number * length, length, snapshot, [])
            return self._run_back(number * length, length, consts, own, stacked, state), [], []

        (carried, made), _ = _scan(segment, state, self.snapshots, self.residuals.segments, reverse=True)
        return [*carried, *made]

    def _run_forward(self, carried: list[Any]) -> tuple[list[Any], list[Any]]:
        """The forward loop in one piece: what it carries, and its results. It stacks residuals by layer."""
        count, on_host = self._own_results - self.forward.carries, self.residuals.stacked_on_host

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, made, residuals = self._forward_trip(carried, slices)
            far, near = _apart(residuals, on_host)
            return carried, far, [*made, *near]

        forward, backward = self.forward, self.backward
        # The first trip writes a layer before its own, the last one that reads fetches one behind its own.
        spare = int(not forward.reverse or backward.reverse), int(forward.reverse or not backward.reverse)
        far, _ = _apart([self._var(value).aval for value in self.residuals.stacked], on_host)
        hosts = [_empty_on_host(aval, forward.trips, spare) for aval in far]
        carried, (hosts, kept) = _scan(
            trip, carried, self.given[1], forward.trips, hosts, forward.reverse, forward.unroll
        )
        self.stacked = _together((hosts, kept[count:]), on_host)
        return carried, kept[:count]

    def _run_backward(self, consts: list[Any], carried: list[Any], own: list[Any]) -> list[Any]:
        """The backward loop in one piece."""
        count = len(own) + len(self.given[1])

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, made = self._backward_trip(consts, carried, slices[:count], slices[count:])
            return carried, [], made

        stacks, scan = [*own, *self.given[1], *self.stacked], self.backward
        carried, (_, made) = _scan(trip, carried, stacks, scan.trips, reverse=scan.reverse, unroll=scan.unroll)
        return [*carried, *made]

    def _sweep(self, carried: list[Any], made: list[Any]) -> tuple[list[Any], list[Any]]:
        """The forward loop over the trips in segments, of which it keeps the snapshots."""
        length, on_host = self.residuals.segment_trips, self.residuals.snapshots_on_host

        def segment(number: Any, state: Any, _: Any) -> Any:
            *after, _ = self._run_again(number * length, length, *state)
            return tuple(after), *_apart(state[0], on_host)

        far, _ = _apart(carried, on_host)
        hosts = [_empty_on_host(one, self.residuals.segments, spare=(1, 0)) for one in far]
        state, kept = _scan(segment, (carried, made), [], self.residuals.segments, hosts)
        self.snapshots = _together(kept, on_host)
        return state

    def _run_again(
        self, first: Any, count: int, carried: list[Any], made: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Trips of the forward loop from position `first` on: what they carry, their results, and stacked residuals.

        Args:
          made: stacks into which they write their results; empty if these are there already.
        """
        if not count:
            return carried, made, []

        def trip(position: Any, state: Any, _: Any) -> Any:
            layer, (carried, made) = self._layer(first + position), state
            carried, results, residuals = self._forward_trip(carried, _slices(self.given[1], layer))
            return (carried, made and _written(made, results, layer)), [], residuals

        (carried, made), (_, kept) = _scan(trip, (carried, made), [], count, unroll=self.forward.unroll)
        return carried, made, kept

    def _run_back(self, first: Any, count: int, consts: Any, own: Any, stacked: list[Any], state: Any) -> Any:
        """Trips of the backward loop over the forward loop's from position `first` on."""
        if not count:
            return state

        def trip(position: Any, state: Any, residuals: list[Any]) -> Any:
            layer, (carried, made) = self._layer(first + position), state
            slices = _slices([*own, *self.given[1]], layer)
            carried, results = self._backward_trip(consts, carried, slices, residuals)
            return (carried, _written(made, results, layer)), [], []

        return _scan(trip, state, stacked, count, reverse=True, unroll=self.backward.unroll)[0]

    @property
    def _own_results(self) -> int:
        """How many results the forward body has beside the residuals."""
        return len(self.forward_body.out_avals) - len(self.residuals.stacked)

    def _forward_trip(self, carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What it carries, its own results, and the residuals."""
        results = list(compat.jaxpr_as_fun(self.forward_body)(*self.given[0], *carried, *slices))
        carries, own = self.forward.carries, self._own_results
        return results[:carries], results[carries:own], results[own:]

    def _backward_trip(
        self, consts: list[Any], carried: list[Any], slices: list[Any], residuals: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        results = list(compat.jaxpr_as_fun(self.backward_body)(*self.given[0], *consts, *carried, *slices, *residuals))
        return results[: self.backward.carries], results[self.backward.carries :]

    def _layer(self, position: Any) -> Any:
        """The index of a trip's slices in the stacks."""
        return self.forward.trips - 1 - position if self.forward.reverse else position

    def _var(self, value: int) -> Any:
        return self.pair.body.values[value]

    def _not_taken(self, slices: Sequence[Any]) -> list[Any]:
        """The backward loop's slices, or stacks, without those that the new residuals replace."""
        taken = set(self.pair.stacks.values())
        return [one for number, one in enumerate(slices) if number not in taken]

    def _stack(self, *inputs: Any) -> list[Any]:
        """The forward body: its carries, the remaining stacks, the new residuals."""
        flat, carries = self.pair.body, self.forward.carries
        stay = [atom for n, atom in enumerate(flat.outvars[carries:]) if n not in self.pair.stacks]
        outputs = [*flat.outvars[:carries], *stay, *map(self._var, self.residuals.stacked)]
        return interpret_eqns(flat.eqns, bindings(flat.closed, inputs), outputs)

    def _recompute(
        self, consts: Any, own_consts: Any, own_carries: Any, kept: Any, slices: Any, residuals: Any
    ) -> list[Any]:
        """The backward body, which recomputes the values that it no longer receives."""
        flat = self.pair.body
        first, _, last = self.forward.split(flat.invars)
        known = dict(compat.consts_of(flat.closed))
        known.update(zip([*first, *last], [*consts, *slices], strict=True))
        known.update((self._var(v), value) for v, value in zip(self.residuals.stacked, residuals, strict=True))
        eqns = [flat.eqns[op] for op in recomputed_ops(self.loop, self.residuals)]
        results = flat.outvars[self.forward.carries :]
        source = {taken: results[made] for made, taken in self.pair.stacks.items()}
        with jax.named_scope(compat.REMATTED):
            again = interpret_eqns(eqns, known, list(source.values()))
        replaced = dict(zip(source, again, strict=True))
        rest = iter(kept)
        own = [replaced[n] if n in replaced else next(rest) for n in range(len(kept) + len(source))]
        return compat.jaxpr_as_fun(self.backward.body)(*own_consts, *own_carries, *own)

    def _empty_stacks(self, avals: Sequence[Any]) -> list[Any]:
        return [compat.empty((self.forward.trips, *one.shape), one.dtype, jax.memory.Space.Device) for one in avals]


def _empty_on_host(aval: Any, trips: int, spare: tuple[int, int]) -> HostArray:
    """A stack in host memory, with a layer to spare where a trip writes or fetches one beyond."""
    return HostArray.empty((trips, *aval.shape), aval.dtype, dim=0, rows=1, trips=trips, spare=spare)


def _scan(
    body: Callable[[Any, Any, list[Any]], tuple[Any, list[Any], list[Any]]],
    state: Any,
    stacks: Sequence[Any],
    count: int,
    hosts: Sequence[HostArray] = (),
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, tuple[list[HostArray], list[Any]]]:
    """Run `body` for positions 0 to count - 1, or back from there: its last state, and its stacked results.

    Args:
      body: (position, state, slices of `stacks`) -> (state, results for the host, results for the device).
      stacks: arrays, or HostArrays, whose slices arrive one trip before they are read.
      hosts: takes the results for the host.
    """
    far = [one for one in stacks if isinstance(one, HostArray)]
    near = [one for one in stacks if not isinstance(one, HostArray)]

    def position(trip: Any) -> Any:
        return count - 1 - trip if reverse else trip

    def fetch(trip: Any) -> list[Any]:
        return [host.rows(position(trip), (0, 1))[0] for host in far]

    def write(trip: Any, hosts: list[HostArray], leaving: list[Any]) -> list[HostArray]:
        return [host.written(position(trip), value[None]) for host, value in zip(hosts, leaving, strict=True)]

    def trip(carry: Any, slices: Any) -> Any:
        number, state, hosts, leaving, arrived = carry
        coming = fetch(number + 1)
        hosts = write(number - 1, hosts, leaving)
        left, right = iter(arrived), iter(slices)
        mine = [next(left if isinstance(one, HostArray) else right) for one in stacks]
        state, out, kept = body(position(number), state, mine)
        return (number + 1, state, hosts, out, coming), kept

    empty = [compat.empty(one.array.shape[1:], one.array.dtype, jax.memory.Space.Device) for one in hosts]
    carry = jnp.int32(0), state, list(hosts), empty, fetch(0)
    (_, state, hosts, leaving, _), kept = lax.scan(trip, carry, near, length=count, reverse=reverse, unroll=unroll)
    return state, (write(count - 1, hosts, leaving), kept)


def _slices(stacks: Sequence[Any], layer: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(one, layer, keepdims=False, allow_negative_indices=False) for one in stacks]


def _written(stacks: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """The stacks with the results of one trip."""
    return [
        lax.dynamic_update_index_in_dim(stack, result, layer, 0, allow_negative_indices=False)
        for stack, result in zip(stacks, results, strict=True)
    ]


def _apart(values: Sequence[Any], on_host: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Those for the host, and the others."""
    pairs = list(zip(values, on_host, strict=True))
    return [value for value, moves in pairs if moves], [value for value, moves in pairs if not moves]


def _together(parts: tuple[Sequence[Any], Sequence[Any]], on_host: Sequence[bool]) -> list[Any]:
    """The inverse of `_apart`."""
    far, near = map(iter, parts)
    return [next(far if moves else near) for moves in on_host]
