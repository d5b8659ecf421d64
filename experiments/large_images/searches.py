"""A step of a case, traced, with what may be tried to make it fit."""

from __future__ import annotations

from experiments.large_images.cases import BUDGETS, HOST_BUDGET, Case
from memplan import pipeline
from memplan.pipeline import Request
from memplan.search import Search

PLANNER = "greedy"


def search_for(case: Case, device: str, size: int, remat: bool) -> Search:
    """Within the device's budget and the host's; with remat, `jax.checkpoint` around each block."""
    step, args = case.make(size, remat)
    request = Request(BUDGETS[device], HOST_BUDGET, device, PLANNER)
    return pipeline.search_for(step, args, {}, {"donate_argnums": 0}, request)
