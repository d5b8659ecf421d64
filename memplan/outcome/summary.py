"""An outcome as a report."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax

from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.roofline import copy_seconds
from memplan.outcome import timeline
from memplan.outcome.infeasible import floor_of
from memplan.outcome.timeline import Origins, instruction_of, layer_of
from memplan.planning.loop import Loop, Residuals
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.report.model import Candidate as Row
from memplan.report.model import Choice, Decision, LiveValue, Report
from memplan.report.timeline import Line, Timeline
from memplan.xla.module import read_module
from memplan.xla.target import XLA_LIMIT
from memplan.xla.write import original

_MOST_ROWS = 30  # of what stands at the peak
_PLAIN = "plain"


def report_of(found: Outcome) -> Report:
    """Everything about a step that was compiled."""
    made, plain, result = found.planned, found.planned.plain, found.planned.result
    origins = Origins(made.base.module)
    rows = tuple(decisions(found, origins))
    decided = {row.name: row.decision for row in rows}
    drawn = timeline.timeline(result, origins, decided)
    floor_bytes, _ = floor_of(found)
    step, unmodified = result.traffic, found.unmodified
    return Report(
        device=found.target.device.name,
        runs_on=jax.devices()[0].device_kind,
        status=_status(found),
        planner=found.plan.planner if found.plan is not None else "none",
        budget_bytes=found.limits.device_bytes,
        host_budget_bytes=found.limits.host_bytes,
        baseline_peak_bytes=unmodified.device_bytes if unmodified else None,
        predicted_peak_bytes=made.predicted_bytes,
        compiled_peak_bytes=found.device_bytes,
        observed_peak_bytes=None,
        host_peak_bytes=found.host_bytes,
        offloaded_bytes=step.copied_out_nbytes,
        recomputed_flops=max(0.0, step.flops - (unmodified or plain).traffic.flops),
        baseline_step_s=unmodified.traffic.step_s if unmodified else None,
        predicted_step_s=step.step_s,
        floor_bytes=floor_bytes,
        lower_bound_s=made.bound_s,
        gap_s=max(0.0, step.step_s - made.bound_s),
        attempts=found.compilations,
        copy_s=step.copy_s,
        hidden_copy_s=step.hidden_copy_s,
        stall_s=sum(end - start for start, end in step.stalls),
        decisions=rows,
        live_at_peak=tuple(live_at_peak(result, origins, decided)),
        candidates=tuple(_candidates(found)),
        versions=versions(),
        timeline=drawn,
        lines=tuple(_lines(unmodified, result, drawn)),
        planning_s=made.planning_s,
        preparation_s=found.seconds,
        xla_limit_bytes=int(XLA_LIMIT * found.target.device.memory_bytes) if found.target.is_gpu else None,
        **_found(found),
    )


def _status(found: Outcome) -> str:
    if not found.fits:
        return "does not fit"
    return "untouched" if found.plan is None else "fits"


def _candidates(found: Outcome) -> Iterator[Row]:
    plain = found.unmodified
    if found.plan is not None and plain is not None:
        verdict = "fits" if found.limits.allow(plain.device_bytes, 0) else "over the device budget"
        yield Row(_PLAIN, plain.device_bytes, 0, plain.traffic.step_s, verdict)
    name = found.plan.planner if found.plan is not None else _PLAIN
    yield Row(name, found.device_bytes, found.host_bytes, found.step_s, "chosen" if found.fits else "does not fit")


def _lines(unmodified: ScheduledModule | None, result: ScheduledModule, drawn: Timeline) -> Iterator[Line]:
    if unmodified is not None:
        same = unmodified is result
        plain = drawn if same else timeline.timeline(unmodified, Origins(unmodified.module), {})
        yield timeline.line("unmodified step", plain)


def decisions(found: Outcome, origins: Origins) -> Iterator[Decision]:
    """What happens to what the unmodified step has at its peak, and to all that is made again or copied."""
    made, problem = found.planned, found.planned.base.timed
    for loop, residuals in found.program.loops:
        yield from residual_decisions(loop, residuals)
    if made.plan is None:
        return
    runs = Counter(one.number for one in made.schedule if one.kind is Kind.RUN)
    copies = Counter(one.number for one in made.schedule if one.kind in (Kind.OFFLOAD, Kind.PREFETCH))
    kept = {one.buffer for one in timeline.at_peak(made.base)}
    for number, buffer in enumerate(problem.buffers):
        again = runs[buffer.maker] - 1 if buffer.maker is not None else 0
        if buffer.role is not Role.TEMPORARY or not buffer.nbytes or not (number in kept or again or copies[number]):
            continue
        choice: Choice = "offload" if copies[number] else "recompute" if again else "keep"
        seconds = copies[number] * copy_seconds(buffer.nbytes, found.target.device)
        if buffer.maker is not None:
            seconds += again * problem.kernels[buffer.maker].seconds
        array = origins.array(buffer.name)
        shape, dtype = (array.dims, array.numpy_name) if array else ((), "")
        source = origins.source(instruction_of(buffer.name))
        yield Decision(buffer.name, shape, dtype, buffer.nbytes, source, choice, seconds)


def residual_decisions(loop: Loop, residuals: Residuals | None) -> Iterator[Decision]:
    """What happens to every residual of a pair of loops, those that memplan stacks and those that the step did."""
    if residuals is None:
        return
    body = loop.body
    for value in sorted(loop.needed.union(residuals.stacked)):
        made, known = body.producer[value], body.values[value]
        choice: Choice = "offload" if value in residuals.moved else "keep" if value in residuals.kept else "recompute"
        source = body.ops[made].source if made is not None else ""
        shape, nbytes = (loop.trips, *known.shape), loop.trips * known.nbytes
        yield Decision(f"{known.name} of {loop.trips} trips", shape, known.dtype, nbytes, source, choice, 0.0)


def live_at_peak(result: ScheduledModule, origins: Origins, decided: Mapping[str, str]) -> Iterator[LiveValue]:
    """The largest buffers that are on the device when its memory peaks, arguments among them."""
    problem = result.problem
    standing = [(one.nbytes, problem.buffers[one.buffer].name) for one in timeline.at_peak(result)]
    arguments = [(b.nbytes, b.name) for b in problem.buffers if b.role is Role.ARGUMENT]
    for nbytes, name in sorted([*standing, *arguments], key=lambda row: -row[0])[:_MOST_ROWS]:
        instruction = instruction_of(name)
        source = "argument" if (nbytes, name) in arguments else origins.source(instruction)
        shown = layer_of(origins.scope(instruction)) or name
        base = original(instruction)
        decision = decided.get(name) or decided.get(name.replace(instruction, base), "")
        yield LiveValue(shown, nbytes, origins.shape(name), source, decision)


def _found(found: Outcome) -> dict[str, int]:
    """What the compiled program has: instructions that XLA's own rematerialization added, and those of a plan."""
    is_gpu, is_planned = found.target.is_gpu, found.planned.plan is not None
    names = list(read_module(found.executable.text).instructions) if is_gpu or is_planned else []
    added = {"xla_rematerialized": sum(".remat" in name for name in names) if is_gpu else 0}
    return {**added, **_of_plan(names)} if is_planned else added


def _of_plan(names: Sequence[str]) -> dict[str, int]:
    """Its copies and repeated kernels."""
    copies = [name for name in names if any(f".{kind.value}" in name for kind in (Kind.OFFLOAD, Kind.PREFETCH))]
    starts = [name for name in copies if not name.rstrip("0123456789").endswith("ed")]
    again = [name for name in names if name != original(name) and name not in copies]
    return {"copies_found": len(starts), "recomputations_found": len(again)}


def versions() -> tuple[tuple[str, str], ...]:
    return (
        ("python", platform.python_version()),
        ("jax", jax.__version__),
        ("jaxlib", importlib.metadata.version("jaxlib")),
    )
