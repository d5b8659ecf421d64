"""memplan's planner by its name, and its offloads."""

import pytest

from memplan.errors import MemplanError
from memplan.planning.packing import pack
from memplan.planning.registry import OWN, planner_named
from memplan.planning.schedule import Kind
from tests.planning.steps import training


def test_names_and_planners() -> None:
    custom = type("Other", (), {"name": "other", "plan": OWN.plan})()
    assert planner_named(None) is planner_named("kernels") is OWN
    assert planner_named(custom) is custom
    with pytest.raises(MemplanError, match="no planner 'milp'"):
        planner_named("milp")


def test_it_offloads_where_that_is_cheaper_and_the_host_has_room() -> None:
    problem = training(8, 5)
    kinds = {}
    for host_nbytes in (0, 2**40):
        budget = int(0.75 * pack(problem).nbytes)
        solution = OWN.plan(problem, budget, host_nbytes, lambda nbytes: nbytes * 1e-12)
        kinds[host_nbytes] = {action.kind for action in solution.schedule}
    assert Kind.OFFLOAD in kinds[2**40] and kinds[0] == {Kind.RUN}
