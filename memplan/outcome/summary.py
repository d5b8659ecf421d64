"""An outcome as a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from memplan import io
from memplan.compilation.compiler import compile_program
from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.roofline import copy_seconds
from memplan.outcome import timeline
from memplan.outcome.infeasible import floor_of
from memplan.outcome.pooled import pooled
from memplan.outcome.slabs import loop_rows, loops_of, split_decisions, unsplit
from memplan.outcome.timeline import Origins
from memplan.planning.loops import Loop, Residuals
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.report.model import Candidate, Choice, Decision, LiveValue, Report
from memplan.report.timeline import Line, Timeline
from memplan.xla.buffers import instruction_of
from memplan.xla.cuda_graphs import has_own_rule, launches
from memplan.xla.host_copies import transfers
from memplan.xla.local import pools
from memplan.xla.module import Module, read_module
from memplan.xla.sources import constants, layer_of
from memplan.xla.target import Target, rematerializes_above, without_messages
from memplan.xla.write import original

_MOST_ROWS = 30  # of what is live at the peak
_PLAIN = "plain"
_REMATERIALIZES = b"hlo_rematerialization.cc", b"gpu_hlo_schedule.cc"  # who says on stderr that a step is too large
_HUGE = 2**31  # elements: cuDNN counts in int32


def report_of(outcome: Outcome) -> Report:
    """Everything about a step that was compiled."""
    planned, plain, result = outcome.planned, outcome.planned.plain, outcome.planned.result
    origins = Origins(planned.base.module)
    decided = tuple(_decisions(outcome, origins))
    by_buffer = {one.name: one.decision for one in decided}
    memory = timeline.timeline(result, origins, by_buffer)
    floor_bytes, _ = floor_of(outcome)
    step, unmodified = result.replay, outcome.unmodified
    moved = {loop.name: transfers(result.module, loop, result.device) for loop in loops_of(result)}
    return Report(
        device=outcome.target.device.name,
        runs_on=jax.devices()[0].device_kind,
        status=status_of(outcome),
        planner=outcome.plan.planner if outcome.plan is not None else "none",
        budget_bytes=outcome.limits.device_bytes,
        host_budget_bytes=outcome.limits.host_bytes,
        baseline_peak_bytes=unmodified.device_bytes if unmodified else None,
        predicted_peak_bytes=planned.predicted_bytes,
        compiled_peak_bytes=outcome.device_bytes,
        observed_peak_bytes=None,
        host_peak_bytes=outcome.host_bytes,
        offloaded_bytes=step.copied_out_nbytes,
        recomputed_flops=max(0.0, step.flops - (unmodified or plain).replay.flops),
        baseline_step_s=unmodified.replay.step_s if unmodified else None,
        predicted_step_s=step.step_s,
        floor_bytes=floor_bytes,
        lower_bound_s=planned.bound_s,
        gap_s=max(0.0, step.step_s - planned.bound_s),
        attempts=outcome.compilations,
        copy_s=step.copy_s,
        hidden_copy_s=step.hidden_copy_s,
        stall_s=sum(end - start for start, end in step.stalls),
        decisions=decided,
        live_at_peak=_live_at_peak(outcome, origins, by_buffer),
        candidates=tuple(_candidates(outcome)),
        versions=versions(),
        timeline=memory,
        lines=tuple(_lines(unmodified, result, memory)),
        planning_s=planned.planning_s,
        preparation_s=outcome.seconds,
        xla_limit_bytes=_xla_limit(outcome.target, unmodified or plain) if outcome.target.is_gpu else None,
        slab_loops=tuple(loop_rows(outcome, origins, moved)),
        loop_copies=sum(copies for copies, _ in moved.values()),
        loop_kernels=sum(kernels for _, kernels in moved.values()),
        unsplit=unsplit(outcome.program.in_slabs, _MOST_ROWS),
        constant_bytes=outcome.executable.memory.constant_bytes,
        huge_arrays=_huge_arrays(unmodified) if unmodified and outcome.target.is_gpu else None,
        **_counts(outcome),
        **_pooled(outcome),
        **_by_jit(outcome),
    )


def _xla_limit(target: Target, module: ScheduledModule) -> int:
    return rematerializes_above(target.device, module.resident_bytes - module.constant_bytes)


def _by_jit(outcome: Outcome) -> dict[str, Any]:
    """What `jax.jit` makes of the step by default: compiled, where XLA would rematerialize."""
    target, unmodified = outcome.target, outcome.unmodified
    if unmodified is None:
        return {}
    same = {"jit_peak_bytes": unmodified.device_bytes, "jit_step_s": unmodified.replay.step_s}
    if not target.is_gpu or unmodified.device_bytes <= _xla_limit(target, unmodified):
        return same
    try:
        with without_messages(*_REMATERIALIZES):
            found = compile_program(outcome.program.original, target, outcome.args, outcome.kwargs)
    except jax.errors.JaxRuntimeError:  # out of memory, or a kernel that there is none for
        return {}
    made = replace(unmodified, module=read_module(found.text))
    if not _rematerialized(made.module, unmodified.module):
        return same
    return {"jit_peak_bytes": found.memory.device_bytes, "jit_step_s": made.replay.step_s}


def _rematerialized(compiled: Module, handed: Module) -> int:
    """Instructions that XLA's rematerialization added; another pass, before the hook, has names like its own."""
    return sum(".remat" in name for name in compiled.instructions if name not in handed.instructions)


def _huge_arrays(unmodified: ScheduledModule) -> int:
    """Arrays of so many elements that cuDNN does not count them."""
    known = Origins(unmodified.module)
    arrays = (known.array(buffer.name) for buffer in unmodified.problem.buffers)
    return sum(array is not None and array.size >= _HUGE for array in arrays)


def status_of(outcome: Outcome) -> str:
    """`Report.status` alone: the rest of a report may compile the plain step."""
    if not outcome.fits:
        return "does not fit"
    return "untouched" if outcome.plan is None else "fits"


def _candidates(outcome: Outcome) -> Iterator[Candidate]:
    plain = outcome.unmodified
    if outcome.plan is not None and plain is not None:
        verdict = "fits" if outcome.limits.allow(plain.device_bytes, 0) else "over the device budget"
        yield Candidate(_PLAIN, plain.device_bytes, 0, plain.replay.step_s, verdict)
    verdict = "chosen" if outcome.fits else "does not fit"
    yield Candidate(outcome.way, outcome.device_bytes, outcome.host_bytes, outcome.step_s, verdict)


def _lines(unmodified: ScheduledModule | None, result: ScheduledModule, memory: Timeline) -> Iterator[Line]:
    if unmodified is not None:
        same = unmodified is result
        plain = memory if same else timeline.timeline(unmodified, Origins(unmodified.module), {})
        yield timeline.line("unmodified step", plain)


def _decisions(outcome: Outcome, origins: Origins) -> Iterator[Decision]:
    """What happens to what the unmodified step has at its peak, and to all that is recomputed or copied."""
    planned, problem = outcome.planned, outcome.planned.base.timed_problem
    for loop, residuals in outcome.program.loops:
        yield from _residual_decisions(loop, residuals)
    yield from split_decisions(outcome)
    if planned.plan is None:
        return
    runs = Counter(one.number for one in planned.schedule if one.kind is Kind.RUN)
    copies = Counter(one.number for one in planned.schedule if one.kind in (Kind.OFFLOAD, Kind.PREFETCH))
    at_peak = {one.buffer for one in timeline.peak_lifetimes(planned.base)}
    for number, buffer in enumerate(problem.buffers):
        recomputed = runs[buffer.maker] - 1 if buffer.maker is not None else 0
        if buffer.role is not Role.TEMPORARY or not buffer.nbytes:
            continue
        if not (number in at_peak or recomputed or copies[number]):
            continue
        choice: Choice = "offload" if copies[number] else "recompute" if recomputed else "keep"
        seconds = copies[number] * copy_seconds(buffer.nbytes, outcome.target.device)
        if buffer.maker is not None:
            seconds += recomputed * problem.kernels[buffer.maker].seconds
        array = origins.array(buffer.name)
        shape, dtype = (array.dims, array.numpy_name) if array else ((), "")
        source = origins.source(instruction_of(buffer.name))
        yield Decision(buffer.name, shape, dtype, buffer.nbytes, source, choice, seconds)


def _residual_decisions(loop: Loop, residuals: Residuals | None) -> Iterator[Decision]:
    """What happens to every residual of a pair of loops, those that memplan stacks and those that the step did."""
    if residuals is None:
        return
    body = loop.body
    for value in sorted(loop.needed.union(residuals.stacked)):
        maker, known = body.producer[value], body.values[value]
        choice: Choice = "offload" if value in residuals.on_host else "keep" if value in residuals.kept else "recompute"
        source = body.ops[maker].source if maker is not None else ""
        shape, nbytes = (loop.trips, *known.shape), loop.trips * known.nbytes
        yield Decision(f"{known.name} of {loop.trips} trips", shape, known.dtype, nbytes, source, choice, 0.0)


def _live_at_peak(outcome: Outcome, origins: Origins, by_buffer: Mapping[str, str]) -> tuple[LiveValue, ...]:
    """The largest buffers that are on the device when its memory peaks, arguments and constants among them."""
    result = outcome.planned.result
    problem = result.problem

    def rows() -> Iterator[LiveValue]:
        for one in timeline.peak_lifetimes(result):
            name = problem.buffers[one.buffer].name
            yield row(name, one.nbytes, origins.source(instruction_of(name)))
        for one in problem.buffers:
            if one.role is Role.ARGUMENT:
                yield row(one.name, one.nbytes, "argument")
        for op, source in constants(outcome.planned.base.module):
            yield LiveValue(f"{op.name}, a constant", op.nbytes, op.result[0].in_numpy, source, "")

    def row(name: str, nbytes: int, source: str) -> LiveValue:
        instruction = instruction_of(name)
        shown = layer_of(origins.scope(instruction)) or name
        base = original(instruction)
        decision = by_buffer.get(name) or by_buffer.get(name.replace(instruction, base), "")
        return LiveValue(shown, nbytes, origins.shape(name), source, decision)

    return tuple(sorted(rows(), key=lambda one: -one.nbytes)[:_MOST_ROWS])


def _counts(outcome: Outcome) -> dict[str, int]:
    """What the compiled program has: instructions that XLA's own rematerialization added, launches, those of a plan."""
    is_gpu, is_planned = outcome.target.is_gpu, outcome.planned.plan is not None
    if not is_gpu and not is_planned:
        return {"xla_rematerialized": 0}
    compiled = read_module(outcome.executable.text)
    counts = {"xla_rematerialized": _rematerialized(compiled, outcome.planned.result.module) if is_gpu else 0}
    own_rule = has_own_rule(outcome.program.options.get("compiler_options") or {})
    if is_gpu and not own_rule and (found := launches(compiled, outcome.target.device)):
        counts |= {"cuda_graphs": found.graphs, "single_launches": found.singles}
    return {**counts, **_plan_counts(list(compiled.instructions))} if is_planned else counts


def _pooled(outcome: Outcome) -> dict[str, Any]:
    """What XLA's pools make of it."""
    if not outcome.target.is_gpu:
        return {}
    found = pooled(outcome, pools())
    device, host = found.device, found.host
    return {
        "pool_peak_bytes": device.in_use_bytes if device and device.refused_nbytes is None else None,
        "pinned_bytes": host.pool_bytes if host.refused_nbytes is None else None,
        "exports": found.exports,
    }


def _plan_counts(names: Sequence[str]) -> dict[str, int]:
    """Copies and recomputed kernels."""
    copies = [name for name in names if any(f".{kind.value}" in name for kind in (Kind.OFFLOAD, Kind.PREFETCH))]
    starts = [name for name in copies if not name.rstrip("0123456789").endswith("ed")]
    remat = [name for name in names if name != original(name) and name not in copies]
    return {"copies_found": len(starts), "recomputations_found": len(remat)}


def versions() -> tuple[tuple[str, str], ...]:
    """Of whatever changes the figures."""
    return io.versions("memplan", "jax", "jaxlib")
