"""A step of a case, compiled in each of the ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.large_images.cases import BUDGETS, HOST_BUDGET, Case
from memplan import pipeline
from memplan.outcome.infeasible import floor_of
from memplan.pipeline import Outcome, Request
from memplan.studies.baselines import Baseline, Baselines
from memplan.units import parse_bytes, show_bytes

OPTIONS = {"donate_argnums": 0}


@dataclass(frozen=True)
class Compiled:
    """One program.

    Attributes:
      step_s: by the replay; bytes are the compiler's.
      refused: why it does not fit; "" where it fits.
    """

    device_bytes: int
    host_bytes: int
    step_s: float
    refused: str


def compiled(case: Case, device: str, size: int, way: str) -> Iterator[Compiled]:
    """The step of this size; of XLA's own rematerialization as it is, and if that does not fit, held to the budget."""
    if way == "memplan":
        yield _planned(case, device, size)
        return
    budget = parse_bytes(BUDGETS[device], 0)
    step, args = case.make(size, way == "jax.checkpoint")
    ways = Baselines(step, args, OPTIONS, pipeline.target_of(device))
    plain = ways.plain()
    yield _within(plain, budget)
    if way == "xla" and plain.device_bytes > budget:
        yield _within(ways.xla(plain.resident_bytes, budget), budget)


def _planned(case: Case, device: str, size: int) -> Compiled:
    step, args = case.make(size, False)
    found = pipeline.best(step, args, {}, OPTIONS, Request(BUDGETS[device], HOST_BUDGET, device))
    return Compiled(found.device_bytes, found.host_bytes, found.step_s, "" if found.fits else _limit(found))


def _limit(found: Outcome) -> str:
    """One kernel whose operands alone are over the budget, or what the least plan takes."""
    floor, kernel = floor_of(found)
    if floor > found.limits.device_bytes:
        return f"floor {show_bytes(floor)}, {kernel}"
    if found.device_bytes > found.limits.device_bytes:
        return f"the next needs {show_bytes(found.device_bytes)}"
    return f"the next needs {show_bytes(found.host_bytes)} of the host"


def _within(found: Baseline, budget: int) -> Compiled:
    refused = "" if found.device_bytes <= budget else f"the next needs {show_bytes(found.device_bytes)}"
    return Compiled(found.device_bytes, found.host_bytes, found.step_s, refused)
