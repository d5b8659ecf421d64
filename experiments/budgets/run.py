"""Plans every case, has XLA compile every plan for the described GPU, and writes what was predicted and what came out.

    python -m experiments.budgets.run [--only NAME ...] [--out FOLDER] [--force]

One JSON per case, written whole or not at all; cases that have one are skipped. `NAME` is a case or the beginning of
one. What `memplan.jit(step, budget=..., device=..., donate_argnums=0).plan(*args)` does is done here by the same
`search.Search`, so that every compiled candidate can be looked at and the unmodified step is compiled only once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.budgets.cases import CASES, Case, Program
from memplan import pipeline, summary
from memplan.candidates import Candidate
from memplan.compiling import bytes_by_segment
from memplan.errors import InfeasibleBudgetError
from memplan.files import write_whole
from memplan.pipeline import Request
from memplan.planning.floor import floor
from memplan.planning.planners.protocol import Planner, Problem, Proposal
from memplan.planning.simulate import Simulator
from memplan.search import Search
from memplan.verify.memory import standing_at_peak

RESULTS = Path(__file__).parent / "results"
OPTIONS = {"donate_argnums": 0}
VERSIONED = ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclass
class Timed:
    """A planner that notes how long it takes."""

    planner: Planner
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.planner.name

    def propose(self, problem: Problem) -> Proposal:
        start = time.perf_counter()
        try:
            return self.planner.propose(problem)
        finally:
            self.seconds += time.perf_counter() - start


@lru_cache(maxsize=1)  # one at a time: executables are large
def known(program: Program, device: str) -> Search:
    """Traced, and compiled unmodified: what the cases of one program on one device share."""
    step, args = program.make()
    search = pipeline.search_for(step, args, {}, OPTIONS, Request(device=device))
    search.plain()
    return search


def measure(case: Case) -> dict[str, Any]:
    """Plan one case; the figures as a JSON object."""
    start = time.perf_counter()
    shared = known(case.program, case.device)
    plain, compiled_plain = shared.plain(), time.perf_counter()
    planner = Timed(shared.planner)
    search = replace(shared, budget=plain.device_bytes * case.percent // 100, planner=planner, tried=[])
    found: dict[str, Any] = {"status": "", "planner": None}
    chosen = None
    try:
        chosen = search.best("compile")
        report = summary.planned(
            search.graph,
            search.target,
            search.budget,
            search.host_budget,
            chosen,
            plain,
            search.tried,
            search.lowest.nbytes,
            search.least_s,
        )
        found = {
            "status": report.status,
            "planner": report.planner,
            "predicted_peak_bytes": report.predicted_peak_bytes,
            "compiled_peak_bytes": report.compiled_peak_bytes,
            "host_bytes": report.host_peak_bytes,
            "offloaded_bytes": report.offloaded_bytes,
            "recomputed_flops": report.recomputed_flops,
            "step_s": report.predicted_step_s,
        }
    except InfeasibleBudgetError as error:
        found |= {"status": "infeasible", "why": str(error)}
    except Exception as error:  # a bug of memplan is a finding, too
        traceback.print_exc()
        found |= {"status": "error", "why": f"{type(error).__name__}: {error}"}
    end = time.perf_counter()
    return {
        "case": case.name, "program": case.program.name, "device": case.device, "percent": case.percent,
        "required": case.required, "budget_bytes": search.budget, "host_budget_bytes": search.host_budget,
        "baseline_peak_bytes": plain.device_bytes, "baseline_step_s": plain.step_s,
        "floor_bytes": floor(search.graph).nbytes, **found,
        "attempts": attempts(search, chosen),
        "planning_s": planner.seconds, "plain_compile_s": compiled_plain - start, "wall_s": end - start,
        "environment": environment(),
    }  # fmt: skip


def attempts(search: Search, chosen: Candidate | None) -> list[dict[str, Any]]:
    """One row per compiled candidate: memplan's own and XLA's."""
    return [
        {
            "name": one.name,
            "chosen": one is chosen,
            "fits": search.fits(one),
            "predicted_bytes": one.predicted_bytes,
            "compiled_bytes": one.device_bytes,
            "host_bytes": one.host_bytes,
            "step_s": one.step_s,
            **(modelled(search, one) if one.plan is not None else {}),
        }
        for one in search.tried
    ]


def modelled(search: Search, one: Candidate) -> dict[str, Any]:
    """What the simulator says of a plan without feedback, and of the segment where the compiler peaks."""
    assert one.plan is not None
    assert one.executable is not None
    timeline = Simulator(search.graph, search.target.device).run(one.plan)
    row: dict[str, Any] = {
        "segments": len(timeline.moments),
        "model_bytes": timeline.peak_nbytes,
        "host_predicted_bytes": timeline.host_peak_nbytes,
        "simulated_step_s": timeline.step_s,
    }
    measured = bytes_by_segment(one)
    if measured:
        at = max(measured, key=measured.__getitem__)
        moment = timeline.moments[at] if at < len(timeline.moments) else None
        row["compiled_peak"] = {
            "segment": at,
            "compiled_bytes": measured[at],
            "model_bytes": moment.device_nbytes if moment else None,
            "op": search.graph.ops[moment.op].where if moment and moment.op >= 0 else "",
            "standing": [
                f"{s.nbytes / 2**20:.0f} MiB {s.name} {s.source}"
                for s in standing_at_peak(one.executable, search.graph, 8)
            ],
        }
    return row


def environment() -> dict[str, str]:
    """Versions, the machine, and the commit of memplan."""
    found = {name: version(name) for name in VERSIONED}
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    return {
        "python": platform.python_version(), **found, "cpu": f"{os.cpu_count()} cores {cpu}".strip(),
        "memplan": _git("log", "-1", "--format=%h", "--", "memplan", "models"),
        "memplan_modified": str(bool(_git("status", "--porcelain", "--", "memplan", "models"))),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _git(*args: str) -> str:
    here = Path(__file__).parents[2]
    return subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=False).stdout.strip()


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def selected(names: list[str] | None) -> list[Case]:
    """Cases whose name begins with one of `names`; all for None. Raises SystemExit where a name fits nothing."""
    if not names:
        return list(CASES.values())
    lost = [name for name in names if not any(case.startswith(name) for case in CASES)]
    if lost:
        raise SystemExit(f"no case begins with {', '.join(lost)}; there are {', '.join(CASES)}")
    return [case for name, case in CASES.items() if name.startswith(tuple(names))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    for case in selected(args.only):
        path = args.out / f"{case.name}.json"
        if path.exists() and not args.force:
            continue
        found = measure(case)
        write(path, found)
        own = [row for row in found["attempts"] if "model_bytes" in row]
        errors = ", ".join(f"{row['predicted_bytes'] / row['compiled_bytes'] - 1:+.1%}" for row in own)
        print(
            f"{case.name}: {found['status']} by {found['planner']}, {len(found['attempts'])} attempts, "
            f"errors {errors}, {found['wall_s']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
