"""What was found -> Report. Counts and names; decides nothing."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from memplan import timelines
from memplan.candidates import Candidate
from memplan.planning import cost
from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.loop import Loop, Residuals, moved_nbytes, repeated
from memplan.planning.plan import Kind, Plan
from memplan.xla.target import Target
from memplan.report.model import Candidate as Row
from memplan.report.model import Choice, Decision, LiveValue, Report
from memplan.verify.memory import standing_at_peak
from memplan.verify.plan import judge


def untouched(target: Target, budget: int, host_budget: int, plain: Candidate) -> Report:
    """The report of a step that fits as it is."""
    return Report(
        device=target.device.name,
        runs_on=runs_on(),
        status="fits",
        planner="none",
        budget_bytes=budget,
        host_budget_bytes=host_budget,
        baseline_peak_bytes=plain.device_bytes,
        predicted_peak_bytes=plain.predicted_bytes,
        compiled_peak_bytes=plain.device_bytes,
        observed_peak_bytes=None,
        host_peak_bytes=plain.host_bytes,
        offloaded_bytes=0,
        recomputed_flops=0.0,
        baseline_step_s=plain.step_s,
        predicted_step_s=plain.step_s,
        floor_bytes=None,
        lower_bound_s=None,
        candidates=(Row("plain", plain.device_bytes, plain.host_bytes, plain.step_s, "chosen: it fits as it is"),),
        versions=versions(),
        timeline=timelines.compiled(plain),
    )


def planned(
    graph: Graph,
    target: Target,
    budget: int,
    host_budget: int,
    chosen: Candidate,
    plain: Candidate,
    tried: Sequence[Candidate],
    floor_bytes: int,
    lower_bound_s: float,
) -> Report:
    """The report of a step that had to be changed; `graph` is that of the step as it is written."""
    graph = chosen.graph or graph
    loops = chosen.program.loops if chosen.program is not None else ()
    account = judge(chosen.plan, graph) if chosen.plan is not None else None
    compiled = chosen.executable is not None or chosen.stages is not None
    host = chosen.host_bytes if target.is_gpu or account is None else account.host_peak_nbytes
    found = decisions(chosen.plan, graph, target.device) if chosen.plan is not None else {}
    told = {value: decision.decision for value, decision in found.items()}
    if chosen.plan is not None:
        timeline = timelines.simulated(chosen, graph, target.device, told)
    else:
        timeline = timelines.compiled(chosen)
    return Report(
        device=target.device.name,
        runs_on=runs_on(),
        status="fits" if compiled else "predicted to fit",
        planner=chosen.name,
        budget_bytes=budget,
        host_budget_bytes=host_budget,
        baseline_peak_bytes=plain.device_bytes,
        predicted_peak_bytes=chosen.predicted_bytes,
        compiled_peak_bytes=chosen.device_bytes if compiled else None,
        observed_peak_bytes=None,
        host_peak_bytes=host,
        offloaded_bytes=(account.offloaded_nbytes if account else 0)
        + sum(known[0].runs * moved_nbytes(*known) for known in loops),
        recomputed_flops=recomputed_flops(graph, account.recomputed if account else {}) + loop_flops(loops),
        baseline_step_s=plain.step_s,
        predicted_step_s=chosen.step_s,
        floor_bytes=floor_bytes,
        lower_bound_s=lower_bound_s,
        gap_s=chosen.gap_s,
        copy_s=chosen.traffic.copy_s if chosen.traffic else None,
        hidden_copy_s=chosen.traffic.hidden_copy_s if chosen.traffic else None,
        stall_s=max(0.0, chosen.traffic.step_s - chosen.traffic.compute_s) if chosen.traffic else None,
        copies_found=chosen.effect.copies if chosen.effect else None,
        recomputations_found=chosen.effect.recomputations if chosen.effect else None,
        attempts=len(tried),
        decisions=by_size(
            *found.values(),
            *(row for loop, chosen in loops for row in residual_decisions(loop, chosen, target.device)),
        ),
        live_at_peak=live_at_peak(chosen, graph, told),
        candidates=tuple(rows([plain, *tried], chosen, budget, host_budget)),
        versions=versions(),
        timeline=timeline,
        lines=(
            *timelines.line("unmodified step", timelines.compiled(plain)),
            *timelines.line("plan as compiled", timelines.compiled(chosen) if chosen.plan is not None else None),
        ),
    )


def rows(candidates: Iterable[Candidate], chosen: Candidate, budget: int, host_budget: int) -> Iterable[Row]:
    for one in candidates:
        if one is chosen:
            verdict = "chosen: the fastest that fits"
        elif one.device_bytes > budget:
            verdict = "over the device budget"
        elif one.host_bytes > host_budget:
            verdict = "over the host budget"
        elif one.dropped:
            verdict = f"refused: {one.dropped[0]}" + (f", and {len(one.dropped) - 1} more" if one.dropped[1:] else "")
        else:
            verdict = "fits, but slower"
        yield Row(one.name, one.device_bytes, one.host_bytes, one.step_s, verdict)


def decisions(plan: Plan, graph: Graph, device: Device) -> dict[int, Decision]:
    """What happens to every value that outlives the segment it is made in."""
    runs = Counter(a.target for a in plan.actions if a.kind is Kind.COMPUTE)
    moved = Counter(a.target for a in plan.actions if a.kind in (Kind.OFFLOAD, Kind.PREFETCH))
    crossing = _crossing(plan, graph)
    found: dict[int, Decision] = {}
    for value in sorted(crossing | set(moved)):
        made = graph.producer[value]
        if made is None or graph.ops[made].fusion == "view":
            continue
        op, extra = graph.ops[made], runs[made] - 1
        choice: Choice = "offload" if moved[value] else "recompute" if extra else "keep"
        seconds = moved[value] * cost.copy_seconds(graph.nbytes(value), device) if moved[value] else 0.0
        seconds += extra * cost.op_seconds(graph, op, device)
        known = graph.values[value]
        found[value] = Decision(known.name, known.shape, known.dtype, known.nbytes, op.source, choice, seconds)
    return found


def residual_decisions(loop: Loop, residuals: Residuals | None, device: Device) -> Iterator[Decision]:
    """What happens to every residual of a pair of loops, those that memplan stacks and those that the step did."""
    if residuals is None:
        return
    body, times = loop.body, loop.trips * loop.runs
    for value in sorted(loop.needed.union(residuals.stacked)):
        made, known, seconds = body.producer[value], body.values[value], 0.0
        choice: Choice = "offload" if value in residuals.moved else "keep" if value in residuals.kept else "recompute"
        if choice == "offload":
            seconds = 2 * times * cost.copy_seconds(known.nbytes, device)
        elif choice == "recompute" and made is not None:
            seconds = times * cost.op_seconds(body, body.ops[made], device)
        source = body.ops[made].source if made is not None else ""
        shape, nbytes = (loop.trips, *known.shape), loop.trips * known.nbytes
        yield Decision(f"{known.name} of {loop.trips} trips", shape, known.dtype, nbytes, source, choice, seconds)


def by_size(*rows: Decision) -> tuple[Decision, ...]:
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def loop_flops(loops: Sequence[tuple[Loop, Residuals | None]]) -> float:
    """What backward loops do a second time, in a step."""
    return sum(
        loop.runs * loop.trips * sum(loop.body.ops[op].flops for op in repeated(loop, residuals))
        for loop, residuals in loops
        if residuals is not None
    )


def _crossing(plan: Plan, graph: Graph) -> set[int]:
    """Values that some segment makes and does not free."""
    crossing: set[int] = set()
    for segment in plan.segments():
        made = {v for a in segment if a.kind is Kind.COMPUTE for v in graph.ops[a.target].outputs}
        crossing |= made - {a.target for a in segment if a.kind is Kind.FREE}
    return {value for value in crossing if graph.nbytes(value)}


def live_at_peak(chosen: Candidate, graph: Graph, told: Mapping[int, str]) -> tuple[LiveValue, ...]:
    if chosen.executable is None:
        return ()
    found = []
    for row in standing_at_peak(chosen.executable, graph):
        known = graph.values[row.value] if row.value >= 0 else None
        shape = f"{known.dtype}[{','.join(map(str, known.shape))}]" if known else ""
        found.append(LiveValue(row.name, row.nbytes, shape, row.source, told.get(row.value, "")))
    return tuple(found)


def recomputed_flops(graph: Graph, extra: dict[int, int]) -> float:
    return sum(runs * graph.ops[op].flops for op, runs in extra.items())


def runs_on() -> str:
    return jax.devices()[0].device_kind


def versions() -> tuple[tuple[str, str], ...]:
    return (
        ("python", platform.python_version()),
        ("jax", jax.__version__),
        ("jaxlib", importlib.metadata.version("jaxlib")),
    )
