"""Planners by name, and what they differ in."""

from __future__ import annotations

import pytest

from memplan.errors import MemplanError
from memplan.planning.packing import pack
from memplan.planning.registry import PLANNERS, planner_named
from memplan.planning.schedule import Kind
from tests.planning.steps import training


def test_names_and_planners() -> None:
    assert planner_named(None) is planner_named("kernels") is PLANNERS["kernels"]
    assert planner_named(PLANNERS["recompute"]) is PLANNERS["recompute"]
    with pytest.raises(MemplanError, match="no planner 'milp'; there are kernels, recompute"):
        planner_named("milp")


def test_one_offloads_where_that_is_cheaper_and_one_never_does() -> None:
    problem = training(8, 5)
    kinds = {}
    for name, planner in PLANNERS.items():
        found = planner.plan(problem, int(0.75 * pack(problem).nbytes), 2**40, lambda nbytes: nbytes * 1e-12)
        kinds[name] = {action.kind for action in found.schedule}
    assert Kind.OFFLOAD in kinds["kernels"] and kinds["recompute"] == {Kind.RUN}
