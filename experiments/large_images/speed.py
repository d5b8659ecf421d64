"""Pixels a second against size, as memplan's planner predicts them; nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.large_images.cases import BUDGETS, HOST_BUDGET, Case
from memplan import pipeline
from memplan.compiling import Unmodified
from memplan.errors import InfeasibleBudgetError
from memplan.planning.budget import parse_bytes
from memplan.planning.planners.registry import planner_named
from memplan.program.extract import extract
from memplan.program.trace import trace
from memplan.report.document import write_whole
from memplan.search import Search
from memplan.summary import versions

GROWTH = 2.0  # pixels from one size to the next
PLANNER = "greedy"


@dataclass(frozen=True)
class Speed:
    """Of one size, predicted: bytes and seconds of each way, None where it does not fit."""

    size: int
    plain_s: float | None
    checkpoint_s: float | None
    memplan_s: float
    device_bytes: int
    host_bytes: int


def series(case: Case, device: str) -> Iterator[Speed]:
    """From the smallest size in doublings of the pixels until no plan is predicted to fit."""
    pixels = 0.0
    for size in case.sizes:
        if case.pixels(size) >= pixels:
            found = speed_of(case, device, size)
            if found is None:
                return
            yield found
            pixels = GROWTH * case.pixels(size)


def speed_of(case: Case, device: str, size: int) -> Speed | None:
    def kept(search: Search) -> float | None:
        timeline = search.simulated(search.straight)
        return timeline.step_s if timeline.peak_nbytes <= search.budget else None

    search = _search(case, device, size, remat=False)
    plain_s, checkpoint_s = kept(search), kept(_search(case, device, size, remat=True))
    try:
        plan = search.unverified(search.lowest)
    except InfeasibleBudgetError:
        return None
    assert plan.step_s is not None
    return Speed(size, plain_s, checkpoint_s, plan.step_s, plan.device_bytes, plan.host_bytes)


def _search(case: Case, device: str, size: int, remat: bool) -> Search:
    function, args = case.make(size, remat)
    target = pipeline.target_of(device)
    program = trace(function, args, {}, {"donate_argnums": 0})
    return Search(
        program, extract(program), target, args, {}, parse_bytes(BUDGETS[device], 0), parse_bytes(HOST_BUDGET, 0),
        planner_named(PLANNER), lambda *told: None, Unmodified(program, target, args, {}),
    )  # fmt: skip


def measure(case: Case, device: str, path: Path) -> None:
    """Into a file, if it is not there."""
    content = {"case": case.name, "device": device, "budget": BUDGETS[device], "host_budget": HOST_BUDGET}
    content |= {"planner": PLANNER, "rows": [asdict(row) for row in series(case, device)]}
    write_whole(path, json.dumps(content | {"versions": dict(versions())}, indent=1) + "\n")


def known(path: Path) -> list[Speed]:
    return [Speed(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
