"""The decisions of an outcome as rows of its report: buffers, residuals of loops, stored slabs."""

import functools
from collections import Counter
from collections.abc import Iterator

from memplan.compilation.outcome import Outcome
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import Graph
from memplan.planning.loops import stacked_trips
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.planning.slabs.slabs import trips_of
from memplan.report.decisions import Choice, Decision
from memplan.results.choices import Prices
from memplan.results.memory import Origins, peak_lifetimes


def decisions_of(outcome: Outcome, origins: Origins) -> Iterator[Decision]:
    """Decisions about residuals of loops, stored slabs, and buffers live at the peak, recomputed or copied."""
    yield from _residual_decisions(outcome)
    yield from _slab_decisions(outcome)
    planned, problem = outcome.planned, outcome.planned.base.timed_problem
    if planned.plan is None:
        return
    copy_s = functools.partial(copy_seconds, device=outcome.target.device)
    room_nbytes = outcome.limits.host_bytes - planned.predicted_host_bytes
    prices = Prices(problem, planned.schedule, copy_s if outcome.target.is_gpu else None, room_nbytes)
    runs = Counter(one.number for one in planned.schedule if one.kind is Kind.RUN)
    copies = Counter(one.number for one in planned.schedule if one.kind in (Kind.OFFLOAD, Kind.PREFETCH))
    at_peak = {one.buffer for one in peak_lifetimes(planned.base)}
    for number, buffer in enumerate(problem.buffers):
        recomputed = runs[buffer.maker] - 1 if buffer.maker is not None else 0
        if buffer.role is not Role.TEMPORARY or not buffer.nbytes:
            continue
        if not (number in at_peak or recomputed or copies[number]):
            continue
        choice: Choice = "offload" if copies[number] else "recompute" if recomputed else "keep"
        copied_s = copies[number] * copy_s(buffer.nbytes)
        again_s = recomputed * problem.kernels[buffer.maker].seconds if buffer.maker is not None else 0.0
        array = origins.array(buffer.name)
        shape, dtype = (array.dims, array.numpy_name) if array else ((), "")
        source = origins.source(buffer.name)
        choices = prices.of(number, choice, copied_s if choice == "offload" else again_s)
        yield Decision(buffer.name, shape, dtype, buffer.nbytes, source, choice, copied_s + again_s, choices)


def _residual_decisions(outcome: Outcome) -> Iterator[Decision]:
    """A row for every residual of a pair of loops, stacked by memplan or by the step, and for every snapshot."""
    for loop, residuals in outcome.program.loops:
        if residuals is None:
            continue
        body, trips = loop.body, stacked_trips(loop, residuals)
        for value in sorted(loop.needed.union(residuals.stacked)):
            known, kept = body.values[value], value in residuals.kept
            choice: Choice = "offload" if value in residuals.on_host else "keep" if kept else "recompute"
            name = f"{known.name} of {trips} trips" + (f", of {loop.trips}" if trips < loop.trips else "")
            nbytes, source = trips * known.nbytes, _source_of(body, value) or loop.source
            yield Decision(name, (trips, *known.shape), known.dtype, nbytes, source, choice, 0.0)
        count = residuals.segments
        for value, on_host in zip(loop.carried, residuals.snapshots_on_host, strict=False):
            known = body.values[value]
            name = f"{known.name} before {count} segments of {residuals.segment_trips} trips"
            choice = "offload" if on_host else "keep"
            yield Decision(name, (count, *known.shape), known.dtype, count * known.nbytes, loop.source, choice, 0.0)


def _slab_decisions(outcome: Outcome) -> Iterator[Decision]:
    """A row for every array that is computed in slabs and stored."""
    for one in outcome.program.in_slabs:
        graph, trips = one.graph.graph, trips_of(one.graph, one.slabs)
        touched = Counter(value for loop in one.loops for value in (*loop.writes, *loop.reads))
        for loop in one.loops:
            for value in loop.writes:
                array, on_host = graph.values[value], value in one.slabs.on_host
                name = f"{array.name} in {trips} slabs{' on the host' if on_host else ''}"
                # It is copied when it is written, and by every loop that reads it.
                copies = touched[value] if on_host else 0
                seconds = copies * copy_seconds(array.nbytes, outcome.target.device)
                yield Decision(name, array.shape, array.dtype, array.nbytes, _source_of(graph, value), "split", seconds)


def _source_of(graph: Graph, value: int) -> str:
    made = graph.producer[value]
    return graph.ops[made].source if made is not None else ""
