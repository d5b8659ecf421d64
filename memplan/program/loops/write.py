"""Write a pair of loops with other residuals: its bodies, and the loops over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.planning.loops import Loop, Residuals, recomputed_ops
from memplan.program import compat
from memplan.program.host_memory import DEVICE, HostArray
from memplan.program.interpret import bindings, interpret_eqns
from memplan.program.loops.pairs import LoopPair


@dataclass(frozen=True)
class LoopInputs:
    """The constants and stacks that the forward loop reads; the backward loop reads them, too."""

    consts: list[Any]
    stacks: list[Any]


@dataclass(frozen=True)
class SavedForBackward:
    """The values that the forward loop saves for the backward loop."""

    inputs: LoopInputs
    snapshots: list[Any]  # for each carried value, its stack over the segments
    residuals: list[Any]  # for each residual, its stack over the trips outside of segments


@dataclass(frozen=True)
class PairBodies:
    """The new loop bodies of a pair.

    The forward body returns the new residuals after its own results. The backward body takes the
    constants of the forward loop before its own operands, and after them the slices of the forward
    loop and the residuals.
    """

    pair: LoopPair
    forward: compat.Scan
    backward: compat.Scan
    loop: Loop
    residuals: Residuals

    def write(self, rewrite: Callable[[compat.ClosedJaxpr], compat.ClosedJaxpr]) -> WrittenPair:
        """Trace the new bodies.

        Args:
          rewrite: flattens a body, and rewrites the loops inside.
        """
        inputs = [compat.as_struct(var.aval) for var in self.pair.body.invars]
        residuals = [compat.as_struct(self.var_of(value).aval) for value in self.residuals.stacked]
        consts, _, slices = self.forward.split(inputs)
        backward_inputs = [compat.as_struct(var.aval) for var in self.backward.body.jaxpr.invars]
        own_consts, own_carries, own_slices = self.backward.split(backward_inputs)
        remaining = self.not_replaced(own_slices)
        forward_body = rewrite(jax.make_jaxpr(self._run_forward)(*inputs))
        backward_body = rewrite(
            jax.make_jaxpr(
                self._run_backward,
            )(consts, own_consts, own_carries, remaining, slices, residuals)
        )
        return WrittenPair(self, forward_body, backward_body)

    def var_of(self, value: int) -> Any:
        """The variable of a value of the forward body."""
        return self.pair.body.values[value]

    def not_replaced(self, slices: Sequence[Any]) -> list[Any]:
        """The backward loop's slices, or stacks, without those that the new residuals replace."""
        replaced = set(self.pair.stacks.values())
        return [piece for number, piece in enumerate(slices) if number not in replaced]

    def _run_forward(self, *inputs: Any) -> list[Any]:
        """The forward body: its carries, the remaining stacks, the new residuals."""
        flat = self.pair.body
        carries = self.forward.carries
        remaining = [
            atom
            for number, atom in enumerate(
                flat.outvars[carries:],
            )
            if number not in self.pair.stacks
        ]
        residuals = map(self.var_of, self.residuals.stacked)
        outputs = [*flat.outvars[:carries], *remaining, *residuals]
        return interpret_eqns(flat.eqns, bindings(flat.closed, inputs), outputs)

    def _run_backward(
        self,
        consts: Any,
        own_consts: Any,
        own_carries: Any,
        remaining: Any,
        slices: Any,
        residuals: Any,
    ) -> list[Any]:
        """The backward body, which recomputes the values that it no longer receives."""
        flat = self.pair.body
        const_vars, _, slice_vars = self.forward.split(flat.invars)
        bound = dict(compat.consts_of(flat.closed))
        bound.update(zip([*const_vars, *slice_vars], [*consts, *slices], strict=True))
        residual_vars = map(self.var_of, self.residuals.stacked)
        bound.update(zip(residual_vars, residuals, strict=True))

        eqns = [flat.eqns[op] for op in recomputed_ops(self.loop, self.residuals)]
        stacked_atoms = flat.outvars[self.forward.carries :]
        matches = self.pair.stacks.items()
        replaced = {slice_number: stacked_atoms[number] for number, slice_number in matches}
        with jax.named_scope(compat.REMATTED):
            values = interpret_eqns(eqns, bound, list(replaced.values()))

        recomputed = dict(zip(replaced, values, strict=True))
        next_remaining = iter(remaining)
        own_slices = [
            recomputed[number] if number in recomputed else next(next_remaining)
            for number in range(len(remaining) + len(recomputed))
        ]
        return compat.jaxpr_as_fun(self.backward.body)(*own_consts, *own_carries, *own_slices)


@dataclass(frozen=True)
class WrittenPair:
    """A pair of loops over the new bodies.

    `run_forward` returns the values that it saves, and `run_backward` takes them. The first trips
    of the forward loop may be in segments. The forward loop saves a snapshot of each segment: the
    values that are carried into it. The backward loop runs the segment again from its snapshot, now
    with residuals, before it runs the segment's own trips backward. The forward loop stacks the
    residuals of all other trips.

    Trips in segments are numbered in the order of the forward loop. They index the whole stacks
    that they read and write, so no segment copies its part of a stack.
    """

    bodies: PairBodies
    forward_body: compat.ClosedJaxpr
    backward_body: compat.ClosedJaxpr

    def run_forward(self, operands: Sequence[Any]) -> tuple[list[Any], SavedForBackward]:
        """The forward loop: the results of its equation, and the values for the backward loop.

        A result that only the backward loop reads is None: it is no longer stacked.
        """
        consts, carried, stacks = self._forward.split(operands)
        inputs = LoopInputs(consts, stacks)
        if self._residuals.segments:
            result_avals = self.forward_body.out_avals[self._forward.carries : self._own_results]
            results = self._empty_stacks(result_avals)
            (carried, results), snapshots = self._run_segments(inputs, carried, results)
            first = self._residuals.segmented_trips
            count = self._forward.trips - first
            carried, results, residuals = self._run_trips(inputs, first, count, carried, results)
        else:
            snapshots = []
            carried, results, residuals = self._run_whole_forward(inputs, carried)

        next_result = iter(results)
        replaced = self.bodies.pair.stacks
        all_results = [
            None
            if number in replaced
            else next(
                next_result,
            )
            for number in range(len(results) + len(replaced))
        ]
        return [*carried, *all_results], SavedForBackward(inputs, snapshots, residuals)

    def run_backward(self, operands: Sequence[Any], saved: SavedForBackward) -> list[Any]:
        """The backward loop: the results of its equation."""
        consts, carried, stacks = self._backward.split(operands)
        own = LoopInputs(consts, self.bodies.not_replaced(stacks))
        if not self._residuals.segments:
            return self._run_whole_backward(saved, own, carried)
        results = self._empty_stacks(self.backward_body.out_avals[self._backward.carries :])
        length = self._residuals.segment_trips
        first = self._residuals.segmented_trips
        count = self._forward.trips - first
        state = (carried, results)
        state = self._run_trips_back(saved.inputs, first, count, own, saved.residuals, state)

        def run_segment_back(number: Any, state: Any, snapshot: list[Any]) -> Any:
            *_, residuals = self._run_trips(saved.inputs, number * length, length, snapshot, [])
            state = self._run_trips_back(
                saved.inputs,
                number * length,
                length,
                own,
                residuals,
                state,
            )
            return state, [], []

        segments = self._residuals.segments
        state, _ = _scan(run_segment_back, state, saved.snapshots, segments, reverse=True)
        carried, results = state
        return [*carried, *results]

    @property
    def _forward(self) -> compat.Scan:
        return self.bodies.forward

    @property
    def _backward(self) -> compat.Scan:
        return self.bodies.backward

    @property
    def _residuals(self) -> Residuals:
        return self.bodies.residuals

    @property
    def _own_results(self) -> int:
        """How many results the forward body has besides the residuals."""
        return len(self.forward_body.out_avals) - len(self._residuals.stacked)

    def _run_whole_forward(
        self,
        inputs: LoopInputs,
        carried: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The forward loop without segments: its carries, its results, the stacked residuals."""
        forward, backward = self._forward, self._backward
        result_count = self._own_results - forward.carries
        on_host = self._residuals.stacked_on_host

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, results, residuals = self._forward_trip(inputs, carried, slices)
            host_residuals, device_residuals = _by_memory(residuals, on_host)
            return carried, host_residuals, [*results, *device_residuals]

        # The first trip writes the layer before its own. The last trip of the loop that reads
        # the stack fetches the layer after its own.
        padding = (
            int(not forward.reverse or backward.reverse),
            int(forward.reverse or not backward.reverse),
        )
        avals = [self.bodies.var_of(value).aval for value in self._residuals.stacked]
        host_avals, _ = _by_memory(avals, on_host)
        hosts = [_empty_on_host(aval, forward.trips, padding) for aval in host_avals]
        carried, (hosts, stacked) = _scan(
            trip, carried, inputs.stacks, forward.trips, hosts, forward.reverse, forward.unroll
        )
        residuals = _merged((hosts, stacked[result_count:]), on_host)
        return carried, stacked[:result_count], residuals

    def _run_whole_backward(
        self,
        saved: SavedForBackward,
        own: LoopInputs,
        carried: list[Any],
    ) -> list[Any]:
        """The backward loop without segments."""
        count = len(own.stacks) + len(saved.inputs.stacks)
        backward = self._backward

        def trip(_: Any, carried: list[Any], slices: list[Any]) -> Any:
            carried, results = self._backward_trip(
                saved.inputs,
                own.consts,
                carried,
                slices[:count],
                slices[count:],
            )
            return carried, [], results

        stacks = [*own.stacks, *saved.inputs.stacks, *saved.residuals]
        carried, (_, results) = _scan(
            trip, carried, stacks, backward.trips, reverse=backward.reverse, unroll=backward.unroll
        )
        return [*carried, *results]

    def _run_segments(
        self, inputs: LoopInputs, carried: list[Any], results: list[Any]
    ) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        """The forward loop over the segments: its carries and results, and the snapshots."""
        length = self._residuals.segment_trips
        on_host = self._residuals.snapshots_on_host

        def run_segment(number: Any, state: Any, _: Any) -> Any:
            carried, results, _ = self._run_trips(inputs, number * length, length, *state)
            return (carried, results), *_by_memory(state[0], on_host)

        host_carried, _ = _by_memory(carried, on_host)
        segments = self._residuals.segments
        hosts = [_empty_on_host(aval, segments, padding=(1, 0)) for aval in host_carried]
        state, snapshots = _scan(run_segment, (carried, results), [], segments, hosts)
        return state, _merged(snapshots, on_host)

    def _run_trips(
        self, inputs: LoopInputs, first: Any, count: int, carried: list[Any], results: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Trips of the forward loop from position `first` on.

        Args:
          results: stacks into which the trips write their results; empty if they have been written.

        Returns:
          The carries, the results, and the stacked residuals.
        """
        if not count:
            return carried, results, []

        def trip(position: Any, state: Any, _: Any) -> Any:
            layer = self._layer(first + position)
            carried, stacks = state
            slices = _slices(inputs.stacks, layer)
            carried, results, residuals = self._forward_trip(inputs, carried, slices)
            return (carried, stacks and _written(stacks, results, layer)), [], residuals

        unroll = self._forward.unroll
        state, (_, residuals) = _scan(trip, (carried, results), [], count, unroll=unroll)
        carried, results = state
        return carried, results, residuals

    def _run_trips_back(
        self,
        inputs: LoopInputs,
        first: Any,
        count: int,
        own: LoopInputs,
        residuals: list[Any],
        state: tuple[list[Any], list[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Trips of the backward loop that belong to the forward loop's from position `first` on.

        Args:
          state: the carries and results of the backward loop, before and after.
        """
        if not count:
            return state

        def trip(position: Any, state: Any, residuals: list[Any]) -> Any:
            layer = self._layer(first + position)
            carried, stacks = state
            slices = _slices([*own.stacks, *inputs.stacks], layer)
            carried, results = self._backward_trip(inputs, own.consts, carried, slices, residuals)
            return (carried, _written(stacks, results, layer)), [], []

        return _scan(trip, state, residuals, count, reverse=True, unroll=self._backward.unroll)[0]

    def _forward_trip(
        self, inputs: LoopInputs, carried: list[Any], slices: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """One trip of the forward loop: its carries, its own results, and the residuals."""
        run = compat.jaxpr_as_fun(self.forward_body)
        results = list(run(*inputs.consts, *carried, *slices))
        carries = self._forward.carries
        own = self._own_results
        return results[:carries], results[carries:own], results[own:]

    def _backward_trip(
        self,
        inputs: LoopInputs,
        own_consts: list[Any],
        carried: list[Any],
        slices: list[Any],
        residuals: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """One trip of the backward loop: its carries and its results."""
        run = compat.jaxpr_as_fun(self.backward_body)
        results = list(run(*inputs.consts, *own_consts, *carried, *slices, *residuals))
        carries = self._backward.carries
        return results[:carries], results[carries:]

    def _layer(self, position: Any) -> Any:
        """The index of a trip's slices in the stacks."""
        return self._forward.trips - 1 - position if self._forward.reverse else position

    def _empty_stacks(self, avals: Sequence[Any]) -> list[Any]:
        trips = self._forward.trips
        return [compat.empty((trips, *aval.shape), aval.dtype, DEVICE) for aval in avals]


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
