"""A planner is asked for by name or given itself."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.planners.registry import DEFAULT, PLANNERS, planner_named


class Mine:
    name = "mine"

    def propose(self, problem: Problem) -> Proposal:
        raise NotImplementedError


def test_by_name_by_default_and_itself() -> None:
    mine = Mine()
    assert planner_named(mine) is mine
    assert planner_named(None) is PLANNERS[DEFAULT]
    assert isinstance(planner_named("greedy"), GreedyPlanner)


@pytest.mark.parametrize("planner", [Mine, 3, object(), ""], ids=["class", "number", "object", "no name"])
def test_what_is_no_planner_is_refused(planner: Any) -> None:
    if planner == "":
        planner = type("Nameless", (), {"propose": Mine.propose, "name": None})()
    with pytest.raises(MemplanError, match="no planner"):
        planner_named(planner)
