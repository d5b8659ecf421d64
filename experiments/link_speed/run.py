"""One plan over five host links: what the way to the host is worth.

    python -m experiments.link_speed.run [--only PLAN]    # plans and compiles (extra gpu-aot), writes results/
    python -m experiments.link_speed.run --table          # rewrites the table of README.md

A plan is made and compiled once; its compiled schedule is then replayed with the copies of each link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.readme import measure_and_tell
from memplan import pipeline
from memplan.candidates import Candidate
from memplan.errors import InfeasibleBudgetError
from memplan.pipeline import Request
from memplan.planning.devices import named
from memplan.planning.graph import Graph
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.protocol import Planner, Problem, Proposal
from memplan.planning.planners.registry import planner_named
from memplan.summary import versions
from memplan.xla.traffic import traffic
from models.train import googlenet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
LINKS = ("pcie3x16", "pcie4x16", "pcie5x16", "power9-nvlink2", "nvlink-c2c")
DEVICE, BUDGET, HOST_BUDGET = "v100", "6GiB", "256GiB"
IMAGE, BATCH = 2240, 5
MIB = 2**20
_LIGHT = ("view", "elementwise")


def swapping(graph: Graph) -> Graph:
    """The graph for a planner that may move values and run nothing heavy twice, as LMS did."""
    return replace(graph, ops=tuple(op if op.fusion in _LIGHT else replace(op, recomputable=False) for op in graph.ops))


class Swapping(GreedyPlanner):
    def propose(self, problem: Problem) -> Proposal:
        return super().propose(replace(problem, graph=swapping(problem.graph)))


PLANNERS: Mapping[str, Planner] = {"swapping": Swapping(), "memplan": planner_named("milp")}


def planned(name: str) -> tuple[Candidate, Candidate]:
    """The unmodified step, and the fastest plan that fits with the slowest of the links."""
    step, args = googlenet_step(image=IMAGE, batch=BATCH)
    request = Request(BUDGET, HOST_BUDGET, f"{DEVICE}@{LINKS[0]}", PLANNERS[name])
    search = pipeline.search_for(
        step, args, {}, {"donate_argnums": 0}, request, lambda stage, share: print(stage, flush=True)
    )
    plain = search.plain()
    fitting = [*filter(search.fits, search.own())]
    if not fitting:
        raise InfeasibleBudgetError("no plan fits", floor_bytes=search.lowest.nbytes, smallest_bytes=0, operation="")
    return plain, min(fitting, key=lambda one: one.step_s or 0.0)


def measure(name: str) -> str:
    plain, chosen = planned(name)
    assert chosen.executable is not None and chosen.traffic is not None
    rows = {}
    for link in LINKS:
        moved = traffic(chosen.executable.text, named(f"{DEVICE}@{link}"))
        rows[link] = {"step_s": moved.step_s, "copy_s": moved.copy_s, "hidden_copy_s": moved.hidden_copy_s}
    content: dict[str, Any] = {
        "image": IMAGE, "batch": BATCH, "device": DEVICE, "budget": BUDGET, "plain_bytes": plain.device_bytes,
        "plain_step_s": plain.step_s, "device_bytes": chosen.device_bytes, "host_bytes": chosen.host_bytes,
        "compute_s": chosen.traffic.compute_s, "links": rows, "versions": dict(versions()),
    }  # fmt: skip
    return json.dumps(content, indent=1)


def table() -> str:
    names = ("plan", "link", "GB/s", "device MiB", "host MiB", "copies ms", "step ms", "Mpixel/s", "against PCIe 3")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name in PLANNERS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            lines += [_row(name, found, link) for link in LINKS]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Mapping[str, Any], link: str) -> str:
    rows = found["links"]
    seconds = rows[link]["step_s"]
    cells = (
        name,
        link,
        f"{named(f'{DEVICE}@{link}').link.bandwidth / 1e9:.1f}",
        f"{found['device_bytes'] / MIB:.0f}",
        f"{found['host_bytes'] / MIB:.0f}",
        f"{1e3 * rows[link]['copy_s']:.0f}",
        f"{1e3 * seconds:.0f}",
        f"{found['batch'] * found['image'] ** 2 / seconds / 1e6:.1f}",
        f"{rows[LINKS[0]]['step_s'] / seconds:.2f}x",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    measure_and_tell(__doc__, PLANNERS, measure, README, table)
