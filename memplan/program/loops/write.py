"""Write a pair of loops with other residuals: its bodies, and the loops over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.planning.loops import Residuals
from memplan.program import compat
from memplan.program.host_memory import DEVICE, HostArray
from memplan.program.loops.joint import Halves
from memplan.program.loops.pairs import Pair


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopInputs:
    """The constants and stacks that the forward loop reads; the backward loops read them, too."""

    consts: list[Any]
    stacks: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SavedForBackward:
    """The values that the forward loop saves for the backward loops."""

    inputs: LoopInputs
    snapshots: list[Any]  # for each carried value, its stack over the segments
    residuals: list[Any]  # for each residual, its stack over the trips outside of segments


@dataclass(frozen=True)
class LoopPair:
    """A pair of loops with new bodies and new residuals.

    The forward loop stacks what its body makes for the backward bodies, except its own constants
    and slices: the backward loops read them themselves.
    """

    pair: Pair
    halves: Halves
    residuals: Residuals

    def write(self) -> tuple[ForwardLoop, list[BackwardLoop]]:
        """The loops."""
        forward = ForwardLoop(self)
        return forward, [
            BackwardLoop(forward, number, compat.as_scan(eqn))
            for number, eqn in enumerate(self.pair.backward_eqns)
        ]

    @functools.cached_property
    def scan(self) -> compat.Scan:
        """The forward loop."""
        return compat.as_scan(self.pair.forward_eqn)

    @property
    def replaced(self) -> frozenset[int]:
        """The forward loop's old stacks that the new residuals replace."""
        return frozenset(position - self.scan.carries for position in self.pair.residuals)

    @functools.cached_property
    def stacked(self) -> list[int]:
        """The numbers of the forward body's results for the backward bodies that are stacked."""
        consts, _, slices = self.scan.split(self.halves.forward.invars)
        inputs = {*consts, *slices}
        return [
            number
            for number, atom in enumerate(self.halves.crossing)
            if not compat.is_var(atom) or atom not in inputs
        ]

    @property
    def stacked_on_host(self) -> list[bool]:
        """By stacked result: is it on the host?"""
        return [self.halves.on_host[number] for number in self.stacked]

    def crossing(self, consts: list[Any], slices: list[Any], residuals: list[Any]) -> list[Any]:
        """What a backward body takes from the forward body.

        Args:
          consts, slices: of the forward loop.
          residuals: the stacked results.
        """
        const_vars, _, slice_vars = self.scan.split(self.halves.forward.invars)
        inputs = dict(zip([*const_vars, *slice_vars], [*consts, *slices], strict=True))
        by_number = dict(zip(self.stacked, residuals, strict=True))
        return [
            by_number[number] if number in by_number else inputs[atom]
            for number, atom in enumerate(self.halves.crossing)
        ]


@dataclass(frozen=True)
class ForwardLoop:
    """The forward loop over its new body.

    The first trips may be in segments. The loop saves a snapshot of each segment: the values that
    are carried into it. A backward loop runs the segment again from its snapshot, now with
    residuals, before it runs the segment's own trips backward. The forward loop stacks the
    residuals of all other trips.

    Trips in segments are numbered in the order of the forward loop. They index the whole stacks
    that they read and write, so no segment copies its part of a stack.
    """

    loops: LoopPair

    def run(self, operands: Sequence[Any]) -> tuple[list[Any], SavedForBackward]:
        """The results of its equation, and the values for the backward loops.

        A result that only backward loops read is None: it is no longer stacked.
        """
        consts, carried, stacks = self.scan.split(operands)
        inputs = LoopInputs(consts, stacks)
        if self.residuals.segments:
            own = self.loops.halves.forward.outvars[self.scan.carries : self.loops.halves.own]
            results = _empty_stacks(self.scan.trips, [atom.aval for atom in own])
            (carried, results), snapshots = self._run_segments(inputs, carried, results)
            first = self.residuals.segmented_trips
            count = self.scan.trips - first
            carried, results, residuals = self.run_trips(inputs, first, count, carried, results)
        else:
            snapshots = []
            carried, results, residuals = self._run_whole(inputs, carried)

        next_result = iter(results)
        replaced = self.loops.replaced
        all_results = [
            None if number in replaced else next(next_result)
            for number in range(len(results) + len(replaced))
        ]
        return [*carried, *all_results], SavedForBackward(inputs, snapshots, residuals)

    def run_trips(
        self, inputs: LoopInputs, first: Any, count: int, carried: list[Any], results: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Trips from position `first` on.

        Args:
          results: stacks into which the trips write their results; empty if they have been written.

        Returns:
          The carries, the results, and the stacked residuals.
        """
        if not count:
            return carried, results, []

        def trip(position: Any, state: Any, _: Any) -> Any:
            layer = self.layer(first + position)
            carried, stacks = state
            slices = _slices(inputs.stacks, layer)
            carried, results, residuals = self._trip(inputs, carried, slices)
            return (carried, stacks and _written(stacks, results, layer)), [], residuals

        unroll = self.scan.unroll
        state, (_, residuals) = _scan(trip, (carried, results), [], count, unroll=unroll)
        carried, results = state
        return carried, results, residuals

    def layer(self, position: Any) -> Any:
        """The index of a trip's slices in the stacks."""
        return self.scan.trips - 1 - position if self.scan.reverse else position

    @property
    def scan(self) -> compat.Scan:
        return self.loops.scan

    @property
    def residuals(self) -> Residuals:
        return self.loops.residuals

    def _run_whole(
        self, inputs: LoopInputs, carried: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The loop without segments: its carries, its results, the stacked residuals."""
        scan = self.scan
        result_count = self.loops.halves.own - scan.carries
        on_host = self.loops.stacked_on_host

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, results, residuals = self._trip(inputs, carried, slices)
            host_residuals, device_residuals = _by_memory(residuals, on_host)
            return carried, host_residuals, [*results, *device_residuals]

        # The first trip writes the layer before its own. The last trip of a loop that reads the
        # stack fetches the layer after its own.
        readers = [eqn.params["reverse"] for eqn in self.loops.pair.backward_eqns]
        padding = (
            int(not scan.reverse or any(readers)),
            int(scan.reverse or not all(readers)),
        )
        avals = [self.loops.halves.crossing[number].aval for number in self.loops.stacked]
        host_avals, _ = _by_memory(avals, on_host)
        hosts = [_empty_on_host(aval, scan.trips, padding) for aval in host_avals]
        carried, (hosts, stacked) = _scan(
            trip, carried, inputs.stacks, scan.trips, hosts, scan.reverse, scan.unroll
        )
        residuals = _merged((hosts, stacked[result_count:]), on_host)
        return carried, stacked[:result_count], residuals

    def _run_segments(
        self, inputs: LoopInputs, carried: list[Any], results: list[Any]
    ) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        """The loop over the segments: its carries and results, and the snapshots."""
        length = self.residuals.segment_trips
        on_host = self.residuals.snapshots_on_host

        def run_segment(number: Any, state: Any, _: Any) -> Any:
            carried, results, _ = self.run_trips(inputs, number * length, length, *state)
            return (carried, results), *_by_memory(state[0], on_host)

        host_carried, _ = _by_memory(carried, on_host)
        segments = self.residuals.segments
        hosts = [_empty_on_host(aval, segments, padding=(1, 0)) for aval in host_carried]
        state, snapshots = _scan(run_segment, (carried, results), [], segments, hosts)
        return state, _merged(snapshots, on_host)

    def _trip(
        self, inputs: LoopInputs, carried: list[Any], slices: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """One trip: its carries, its own results, and the residuals."""
        halves = self.loops.halves
        run = compat.jaxpr_as_fun(halves.forward.closed)
        results = list(run(*inputs.consts, *carried, *slices))
        carries, own = self.scan.carries, halves.own
        stacked = [results[own + number] for number in self.loops.stacked]
        return results[:carries], results[carries:own], stacked


@dataclass(frozen=True)
class BackwardLoop:
    """A backward loop over its new body."""

    forward: ForwardLoop
    number: int  # among the backward loops of the pair
    scan: compat.Scan

    def run(self, operands: Sequence[Any], saved: SavedForBackward) -> list[Any]:
        """The results of its equation."""
        consts, carried, stacks = self.scan.split(operands)
        own = LoopInputs(consts, self._own(stacks))
        residuals = self.forward.residuals
        if not residuals.segments:
            return self._run_whole(saved, own, carried)
        results = _empty_stacks(self.scan.trips, self._body.out_avals[self.scan.carries :])
        length = residuals.segment_trips
        first = residuals.segmented_trips
        count = self.scan.trips - first
        state = (carried, results)
        state = self._run_trips(saved.inputs, first, count, own, saved.residuals, state)

        def run_segment_back(number: Any, state: Any, snapshot: list[Any]) -> Any:
            first = number * length
            *_, stacked = self.forward.run_trips(saved.inputs, first, length, snapshot, [])
            return self._run_trips(saved.inputs, first, length, own, stacked, state), [], []

        count = residuals.segments
        state, _ = _scan(run_segment_back, state, saved.snapshots, count, reverse=True)
        carried, results = state
        return [*carried, *results]

    @property
    def _body(self) -> compat.ClosedJaxpr:
        return self.forward.loops.halves.backwards[self.number]

    def _own(self, stacks: Sequence[Any]) -> list[Any]:
        """Its stacks without those that residuals replace."""
        first = self.scan.consts + self.scan.carries
        replaced = self.forward.loops.pair.operands_of(self.number)
        return [stack for number, stack in enumerate(stacks) if first + number not in replaced]

    def _run_whole(self, saved: SavedForBackward, own: LoopInputs, carried: list[Any]) -> list[Any]:
        """The loop without segments."""
        count = len(own.stacks) + len(saved.inputs.stacks)
        scan = self.scan

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, results = self._trip(
                saved.inputs,
                own.consts,
                carried,
                slices[:count],
                slices[count:],
            )
            return carried, [], results

        stacks = [*own.stacks, *saved.inputs.stacks, *saved.residuals]
        carried, (_, results) = _scan(
            trip, carried, stacks, scan.trips, reverse=scan.reverse, unroll=scan.unroll
        )
        return [*carried, *results]

    def _run_trips(
        self,
        inputs: LoopInputs,
        first: Any,
        count: int,
        own: LoopInputs,
        residuals: list[Any],
        state: tuple[list[Any], list[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Trips that belong to the forward loop's from position `first` on.

        Args:
          state: the carries and results of the loop, before and after.
        """
        if not count:
            return state

        def trip(position: Any, state: Any, residuals: list[Any]) -> Any:
            layer = self.forward.layer(first + position)
            carried, stacks = state
            slices = _slices([*own.stacks, *inputs.stacks], layer)
            carried, results = self._trip(inputs, own.consts, carried, slices, residuals)
            return (carried, _written(stacks, results, layer)), [], []

        return _scan(trip, state, residuals, count, reverse=True, unroll=self.scan.unroll)[0]

    def _trip(
        self,
        inputs: LoopInputs,
        own_consts: list[Any],
        carried: list[Any],
        slices: list[Any],
        residuals: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """One trip: its carries and its results.

        Args:
          slices: its own, then those of the forward loop.
        """
        own = len(slices) - len(inputs.stacks)
        crossing = self.forward.loops.crossing(inputs.consts, slices[own:], residuals)
        run = compat.jaxpr_as_fun(self._body)
        results = list(run(*own_consts, *carried, *slices[:own], *crossing))
        return results[: self.scan.carries], results[self.scan.carries :]


def _empty_stacks(trips: int, avals: Sequence[Any]) -> list[Any]:
    return [compat.empty_like(aval, trips) for aval in avals]


def _empty_on_host(aval: Any, trips: int, padding: tuple[int, int]) -> HostArray:
    """A stack in host memory, padded where a trip writes or fetches a layer beyond the stack."""
    shape = (trips, *aval.shape)
    return HostArray.empty(shape, aval.dtype, dim=0, rows=1, trips=trips, spare=padding)


def _scan(
    body: Callable[[Any, Any, list[Any]], tuple[Any, list[Any], list[Any]]],
    state: Any,
    stacks: Sequence[Any],
    count: int,
    hosts: Sequence[HostArray] = (),
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, tuple[list[HostArray], list[Any]]]:
    """Run `body` for positions 0 to count - 1, or back from there.

    A trip fetches the next trip's slices from the host and writes the previous trip's results to
    it, so that both copies overlap with its own computation.

    Args:
      body: (position, state, slices of `stacks`) -> (state, results for the host, for the device).
      stacks: arrays and HostArrays.
      hosts: arrays into which the results for the host are written.

    Returns:
      The last state, and the stacked results: on the host, on the device.
    """
    is_on_host = [isinstance(stack, HostArray) for stack in stacks]
    host_stacks, device_stacks = _by_memory(stacks, is_on_host)
    order = _TripOrder(count, reverse)

    def run_trip(carry: Any, device_slices: Any) -> Any:
        trip, state, hosts, previous_results, host_slices = carry
        next_slices = order.fetched(host_stacks, trip + 1)
        hosts = order.written(hosts, previous_results, trip - 1)
        slices = _merged((host_slices, device_slices), is_on_host)
        state, host_results, device_results = body(order.position(trip), state, slices)
        return (trip + 1, state, hosts, host_results, next_slices), device_results

    no_results = [compat.empty(host.array.shape[1:], host.array.dtype, DEVICE) for host in hosts]
    carry = jnp.int32(0), state, list(hosts), no_results, order.fetched(host_stacks, 0)
    options = {"length": count, "reverse": reverse, "unroll": unroll}
    carry, device_results = lax.scan(run_trip, carry, device_stacks, **options)
    _, state, hosts, last_results, _ = carry
    return state, (order.written(hosts, last_results, count - 1), device_results)


@dataclass(frozen=True)
class _TripOrder:
    """The order in which a loop's trips go over stacks in host memory.

    The trip before the first and the one after the last are in the stacks' padding.
    """

    trips: int
    reverse: bool

    def position(self, trip: Any) -> Any:
        return self.trips - 1 - trip if self.reverse else trip

    def fetched(self, stacks: Sequence[HostArray], trip: Any) -> list[Any]:
        """The slices that a trip reads."""
        return [stack.rows(self.position(trip), (0, 1))[0] for stack in stacks]

    def written(
        self, stacks: Sequence[HostArray], results: Sequence[Any], trip: Any
    ) -> list[HostArray]:
        """The stacks after a trip's results are written."""
        pairs = zip(stacks, results, strict=True)
        return [stack.written(self.position(trip), result[None]) for stack, result in pairs]


def _slices(stacks: Sequence[Any], layer: Any) -> list[Any]:
    return [
        lax.dynamic_index_in_dim(
            stack,
            layer,
            keepdims=False,
            allow_negative_indices=False,
        )
        for stack in stacks
    ]


def _written(stacks: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """The stacks after one trip wrote its results."""
    return [
        lax.dynamic_update_index_in_dim(stack, result, layer, 0, allow_negative_indices=False)
        for stack, result in zip(stacks, results, strict=True)
    ]


def _by_memory(values: Sequence[Any], on_host: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The values for the host, and those for the device."""
    pairs = list(zip(values, on_host, strict=True))
    return (
        [value for value, is_on_host in pairs if is_on_host],
        [value for value, is_on_host in pairs if not is_on_host],
    )


def _merged(parts: tuple[Sequence[Any], Sequence[Any]], on_host: Sequence[bool]) -> list[Any]:
    """The inverse of `_by_memory`."""
    from_host, from_device = map(iter, parts)
    return [next(from_host if is_on_host else from_device) for is_on_host in on_host]
