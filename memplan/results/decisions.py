"""The decisions of an outcome as rows of its report: buffers, residuals of loops, stored slabs."""

import functools
from collections import Counter
from collections.abc import Iterator

from memplan.compilation.outcome import Outcome
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import Graph
from memplan.planning.loops import Loop, stacked_trips
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.planning.slabs.slabs import device_share, trips_of
from memplan.report.decisions import Choice, Decision
from memplan.results.choices import Prices
from memplan.results.memory import Origins, peak_lifetimes


def decisions_of(outcome: Outcome, origins: Origins) -> Iterator[Decision]:
    """Residuals of loops, stored slabs, and buffers that are at the peak, recomputed or copied."""
    yield from _residual_decisions(outcome)
    yield from _slab_decisions(outcome)
    if outcome.planned.plan is not None:
        yield from _buffer_decisions(outcome, origins)


def _buffer_decisions(outcome: Outcome, origins: Origins) -> Iterator[Decision]:
    """A row for every buffer that is at the peak, recomputed or copied."""
    planned = outcome.planned
    problem = planned.base.timed_problem
    copy_s = functools.partial(copy_seconds, device=outcome.target.device)
    host_free_nbytes = outcome.limits.host_bytes - planned.predicted_host_bytes
    link_s = copy_s if outcome.target.backend.has_own_memory else None
    prices = Prices(problem, planned.schedule, link_s, host_free_nbytes)
    runs = Counter(action.number for action in planned.schedule if action.kind is Kind.RUN)
    copy_kinds = (Kind.OFFLOAD, Kind.PREFETCH)
    copies = Counter(action.number for action in planned.schedule if action.kind in copy_kinds)
    at_peak = {lifetime.buffer for lifetime in peak_lifetimes(planned.base)}
    for number, buffer in enumerate(problem.buffers):
        recomputed = runs[buffer.maker] - 1 if buffer.maker is not None else 0
        if buffer.role is not Role.TEMPORARY or not buffer.nbytes:
            continue
        if not (number in at_peak or recomputed or copies[number]):
            continue
        copied_s = copies[number] * copy_s(buffer.nbytes)
        recomputed_s = 0.0
        if buffer.maker is not None:
            recomputed_s = recomputed * problem.kernels[buffer.maker].seconds
        choice: Choice = "keep"
        if copies[number]:
            choice = "offload"
        elif recomputed:
            choice = "recompute"
        array = origins.array(buffer.name)
        yield Decision(
            name=buffer.name,
            shape=array.dims if array else (),
            dtype=array.numpy_name if array else "",
            nbytes=buffer.nbytes,
            source=origins.source(buffer.name),
            decision=choice,
            seconds=copied_s + recomputed_s,
            choices=prices.of(number, choice, copied_s if choice == "offload" else recomputed_s),
        )


def _where(loop: Loop, trips: int) -> str:
    """In what a residual is made, of which this many trips are stacked at once."""
    if loop.is_branch:
        return f"in branch {loop.branches[-1][1]}"
    name = f"of {trips} trips"
    if trips < loop.trips:
        name += f", of {loop.trips}"
    return name if loop.copies == 1 else f"{name}, {loop.copies} times"


def _residual_decisions(outcome: Outcome) -> Iterator[Decision]:
    """A row for every residual of a pair of loops or of a branch, and for every snapshot."""
    for loop, residuals in outcome.program.loops:
        if residuals is None:
            continue
        body = loop.body
        trips = stacked_trips(loop, residuals)
        for value in sorted(loop.needed.union(residuals.stacked)):
            array = body.values[value]
            choice: Choice = "recompute"
            if value in residuals.on_host:
                choice = "offload"
            elif value in residuals.kept:
                choice = "keep"
            yield Decision(
                name=f"{array.name} {_where(loop, trips)}",
                shape=(loop.copies * trips, *array.shape),
                dtype=array.dtype,
                nbytes=loop.copies * trips * array.nbytes,
                source=_source_of(body, value) or loop.source,
                decision=choice,
                seconds=0.0,
            )
        count = residuals.segments
        for value, on_host in zip(loop.carried, residuals.snapshots_on_host, strict=False):
            array = body.values[value]
            yield Decision(
                name=f"{array.name} before {count} segments of {residuals.segment_trips} trips",
                shape=(count, *array.shape),
                dtype=array.dtype,
                nbytes=count * array.nbytes,
                source=loop.source,
                decision="offload" if on_host else "keep",
                seconds=0.0,
            )


def _slab_decisions(outcome: Outcome) -> Iterator[Decision]:
    """A row for every array that is computed in slabs and stored."""
    for record in outcome.program.in_slabs:
        graph = record.graph.graph
        # A host array is copied when it is written, and by every loop that reads it.
        copies = Counter(value for loop in record.loops for value in (*loop.writes, *loop.reads))
        writers = {value: loop for loop in record.loops for value in loop.writes}
        for value, writer in writers.items():
            array = graph.values[value]
            trips = trips_of(record.graph, record.transform.in_level(writer.level))
            on_host = value in record.transform.on_host
            share = 1 - device_share(record.graph, record.transform, value)
            copy_s = copy_seconds(share * array.nbytes, outcome.target.device)
            part = f", {share:.0%} of each" if share < 1 else ""
            place = f"{part} on the host" if on_host else ""
            yield Decision(
                name=f"{array.name} in {trips} slabs{place}",
                shape=array.shape,
                dtype=array.dtype,
                nbytes=array.nbytes,
                source=_source_of(graph, value),
                decision="split",
                seconds=copies[value] * copy_s if on_host else 0.0,
            )


def _source_of(graph: Graph, value: int) -> str:
    producer = graph.producer[value]
    return graph.ops[producer].source if producer is not None else ""
