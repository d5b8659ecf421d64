"""Pixels a second against size, in each way that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.large_images.cases import Case, limits
from experiments.large_images.compiling import compiled
from memplan.io import write_atomic
from memplan.outcome.summary import versions

GROWTH = 2.0  # pixels from one size to the next


@dataclass(frozen=True)
class Speed:
    """Of one size: seconds of each way, None where it does not fit; and the bytes of memplan's."""

    size: int
    plain_s: float | None
    checkpoint_s: float | None
    memplan_s: float
    device_bytes: int
    host_bytes: int


def series(case: Case, device: str) -> Iterator[Speed]:
    """From the smallest size in doublings of the pixels until no plan fits."""
    pixels = 0.0
    for size in case.sizes:
        if case.pixels(size) >= pixels:
            found = speed_of(case, device, size)
            if found is None:
                return
            yield found
            pixels = GROWTH * case.pixels(size)


def speed_of(case: Case, device: str, size: int) -> Speed | None:
    """None where not even a plan fits."""
    [plan] = compiled(case, device, size, "memplan")
    if plan.refused:
        return None
    plain_s, checkpoint_s = (
        None if one.refused else one.step_s
        for way in ("plain", "jax.checkpoint")
        for one in compiled(case, device, size, way)
    )
    return Speed(size, plain_s, checkpoint_s, plan.step_s, plan.device_bytes, plan.host_bytes)


def measure(case: Case, device: str, path: Path) -> None:
    content = limits(case, device) | {"rows": [asdict(row) for row in series(case, device)]}
    write_atomic(path, json.dumps(content | {"versions": dict(versions())}, indent=1) + "\n")


def known(path: Path) -> list[Speed]:
    return [Speed(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
