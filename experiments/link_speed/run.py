"""One plan over five host links: what the way to the host is worth.

    python -m experiments.link_speed.run [--only PLAN]    # plans and compiles (extra gpu-aot), writes results/
    python -m experiments.link_speed.run --table          # rewrites the table of README.md

A plan is made and compiled once; its compiled schedule is then replayed with the copies of each link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.readme import measure_and_tell
from memplan import pipeline
from memplan.pipeline import Outcome, Request
from memplan.planning import planner
from memplan.planning.devices import named
from memplan.planning.planner import Found
from memplan.planning.problem import Problem
from memplan.planning.registry import Planner, planner_named
from memplan.planning.timing import CopySeconds
from memplan.summary import versions
from memplan.xla.traffic import traffic
from models.train import googlenet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
LINKS = ("pcie3x16", "pcie4x16", "pcie5x16", "power9-nvlink2", "nvlink-c2c")
DEVICE, BUDGET, HOST_BUDGET = "v100", "6GiB", "256GiB"
IMAGE, BATCH = 2240, 5
MIB = 2**20


@dataclass(frozen=True)
class Swapping:
    """Moves values and runs no kernel twice, as LMS did; kernels keep their order."""

    name: str = "swapping"

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Found:
        return planner.plan(once_each(problem), budget_nbytes, host_nbytes, copy_s)


def once_each(problem: Problem) -> Problem:
    """The same kernels, none of which may run again."""
    return replace(problem, kernels=tuple(replace(kernel, repeatable=False) for kernel in problem.kernels))


PLANNERS: Mapping[str, Planner] = {"swapping": Swapping(), "memplan": planner_named(None)}


def planned(name: str) -> Outcome:
    """What fits with the slowest of the links."""
    step, args = googlenet_step(image=IMAGE, batch=BATCH)
    request = Request(BUDGET, HOST_BUDGET, f"{DEVICE}@{LINKS[0]}", PLANNERS[name])
    return pipeline.run(step, args, {}, {"donate_argnums": 0}, request, lambda stage, share: print(stage, flush=True))


def measure(name: str) -> str:
    chosen = planned(name)
    plain, made = chosen.made.plain, chosen.made.result
    rows = {}
    for link in LINKS:
        moved = traffic(made.module, named(f"{DEVICE}@{link}"))
        rows[link] = {"step_s": moved.step_s, "copy_s": moved.copy_s, "hidden_copy_s": moved.hidden_copy_s}
    content: dict[str, Any] = {
        "image": IMAGE, "batch": BATCH, "device": DEVICE, "budget": BUDGET, "plain_bytes": plain.device_bytes,
        "plain_step_s": plain.traffic.step_s, "device_bytes": chosen.device_bytes, "host_bytes": chosen.host_bytes,
        "compute_s": made.traffic.compute_s, "links": rows, "versions": dict(versions()),
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
