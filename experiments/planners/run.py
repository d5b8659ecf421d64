"""One graph, one budget -> one JSON object."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.planners.graphs import read
from experiments.planners.model import all_recomputations
from experiments.planners.solve import solve
from experiments.planners.stages import replay, stages_of_nodes

_PROVABLE = 8000  # most possible recomputations for which a proof is tried


def plan(
    path: Path, ratio: float, seconds: float, prove: bool | None = None, runs: int = 1
) -> dict[str, Any]:
    """Plan the graph of a file within `ratio` of its peak; `seconds` includes reading the file.

    `prove` says whether to try a proof; by default, only for small graphs.
    """
    start = time.monotonic()
    graph = read(path)
    stages = stages_of_nodes(graph.nbytes, graph.ticks, graph.inputs, budget_bytes=0)
    base = replay(stages, ()).peak_nbytes
    stages = replace(stages, budget_bytes=int(ratio * base))
    if prove is None:
        prove = stages.count < 1000 and len(all_recomputations(stages)) <= _PROVABLE
    answer = solve(stages, seconds - (time.monotonic() - start), prove, runs if prove else 1)
    duration = sum(graph.ticks)
    result: dict[str, Any] = {
        "graph": path.stem, "ratio": ratio, "budget": stages.budget_bytes, "base_peak": base,
        "status": answer.status,
        "lower_bound_percent": 100 * answer.bound_ticks / duration, "runs": answer.runs,
    }  # fmt: skip
    if answer.recomputed is not None:
        played = replay(stages.refine(answer.runs), answer.recomputed)
        own = {
            stage * answer.runs + answer.runs - 1: name for stage, name in enumerate(graph.names)
        }
        order = [graph.names[item] if item >= 0 else own.get(stage) for stage, item in played.steps]
        result |= {
            "tdi_percent": 100 * answer.extra_ticks / duration, "peak": played.peak_nbytes,
            "duration": duration + answer.extra_ticks,
            "order": [name for name in order if name is not None],
        }  # fmt: skip
    if answer.stage >= 0:
        result |= {"stage": graph.names[answer.stage], "stage_bytes": answer.stage_nbytes}
    return result | {"seconds": round(time.monotonic() - start, 2)}
