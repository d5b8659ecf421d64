"""Pixels a second against size, as memplan's planner predicts them; nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.large_images.cases import Case, limits
from experiments.large_images.searches import PLANNER, search_for
from memplan.errors import InfeasibleBudgetError
from memplan.files import write_whole
from memplan.search import Search
from memplan.summary import versions

GROWTH = 2.0  # pixels from one size to the next


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
        timeline = search.compiling.straight_timeline
        return timeline.step_s if timeline.peak_nbytes <= search.budget else None

    search = search_for(case, device, size, remat=False)
    plain_s, checkpoint_s = kept(search), kept(search_for(case, device, size, remat=True))
    try:
        plan = search.unverified()
    except InfeasibleBudgetError:
        return None
    assert plan.step_s is not None
    return Speed(size, plain_s, checkpoint_s, plan.step_s, plan.device_bytes, plan.host_bytes)


def measure(case: Case, device: str, path: Path) -> None:
    content = limits(case, device) | {"planner": PLANNER, "rows": [asdict(row) for row in series(case, device)]}
    write_whole(path, json.dumps(content | {"versions": dict(versions())}, indent=1) + "\n")


def known(path: Path) -> list[Speed]:
    return [Speed(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
