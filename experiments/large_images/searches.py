"""A step of a case, traced, with what may be tried to make it fit."""

from __future__ import annotations

from experiments.large_images.cases import BUDGETS, HOST_BUDGET, Case
from memplan import pipeline
from memplan.compiling import Unmodified
from memplan.planning.budget import parse_bytes
from memplan.planning.planners.registry import planner_named
from memplan.program.extract import extract
from memplan.program.trace import trace
from memplan.search import Search

PLANNER = "greedy"


def search_for(case: Case, device: str, size: int, remat: bool) -> Search:
    """Within the device's budget and the host's; with remat, `jax.checkpoint` around each block."""
    function, args = case.make(size, remat)
    target = pipeline.target_of(device)
    program = trace(function, args, {}, {"donate_argnums": 0})
    return Search(
        program, extract(program), target, args, {}, parse_bytes(BUDGETS[device], 0), parse_bytes(HOST_BUDGET, 0),
        planner_named(PLANNER), lambda *told: None, Unmodified(program, target, args, {}),
    )  # fmt: skip
