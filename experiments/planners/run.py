"""One graph, one budget -> one JSON object."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from experiments.planners import exact, scaled
from experiments.planners.graphs import NodeGraph, read
from experiments.planners.model import all_recomputations
from experiments.planners.stages import Answer, Stages, replay, stages_of_nodes

PlannerName = Literal["auto", "exact", "scaled"]
_PROVABLE = 8000  # possible recomputations up to which a proof is worth trying


def plan(path: Path, ratio: float, seconds: float, planner: PlannerName = "auto", runs: int = 1) -> dict[str, Any]:
    """Plan the graph of a file within `ratio` of its peak; `seconds` counts from reading the file."""
    begun = time.monotonic()
    graph = read(path)
    stages = stages_of_nodes(graph.nbytes, graph.ticks, graph.inputs, budget_bytes=0)
    base = replay(stages, ()).peak_nbytes
    stages = replace(stages, budget_bytes=int(ratio * base))
    answer = _solve(stages, seconds - (time.monotonic() - begun), planner, runs)
    duration = sum(graph.ticks)
    result: dict[str, Any] = {
        "graph": path.stem,
        "ratio": ratio,
        "budget": stages.budget_bytes,
        "base_peak": base,
        "status": answer.status,
        "lower_bound_percent": 100 * answer.bound_ticks / duration,
        "runs": answer.runs,
    }
    if answer.recomputed is not None:
        result |= _run(graph, stages, answer)
    if answer.stage >= 0:
        result |= {"stage": graph.names[answer.stage], "stage_bytes": answer.stage_nbytes}
    return result | {"seconds": round(time.monotonic() - begun, 2)}


def _solve(stages: Stages, seconds: float, planner: PlannerName, runs: int) -> Answer:
    small = len(all_recomputations(stages)) <= _PROVABLE if stages.count < 1000 else False
    if planner == "exact" or (planner == "auto" and small):
        return exact.solve(stages, seconds, runs)
    return scaled.solve(stages, seconds)


def _run(graph: NodeGraph, stages: Stages, answer: Answer) -> dict[str, Any]:
    assert answer.recomputed is not None
    played = replay(stages.refine(answer.runs), answer.recomputed)
    own = {stage * answer.runs + answer.runs - 1: name for stage, name in enumerate(graph.names)}
    order = [graph.names[item] if item >= 0 else own.get(stage) for stage, item in played.steps]
    duration = sum(graph.ticks)
    return {
        "tdi_percent": 100 * answer.extra_ticks / duration,
        "peak": played.peak_nbytes,
        "duration": duration + answer.extra_ticks,
        "order": [name for name in order if name is not None],
    }
