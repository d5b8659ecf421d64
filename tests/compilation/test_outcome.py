"""What was compiled: whether it fits, and the plan that reproduces it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.compilation.callback import PlannedModule
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Explored, Outcome
from memplan.planning.plan import Plan
from memplan.planning.schedule import Kind
from memplan.planning.transforms import StateOnHost
from memplan.program.trace import Program, WithStateOnHost
from tests.compilation.modules import WITH_RECOMPUTE, scheduled
from tests.compilation.outcomes import PROGRAM, in_slabs, outcome

ON_HOST = PROGRAM.transformed(WithStateOnHost(StateOnHost((0,)), frozenset()), None)


def test_it_fits_where_the_compiler_keeps_both_limits() -> None:
    assert outcome(PROGRAM, 100, 50).fits
    assert not outcome(PROGRAM, 101, 0).fits and not outcome(PROGRAM, 0, 51).fits
    assert outcome(PROGRAM, 100, predicted_to_fit=False).fits


@pytest.mark.parametrize(("limit", "slack"), [(100, 0), (20 << 20, 4 << 10), (1 << 20, 1 << 8)])
def test_what_is_explored_should_fit_up_to_the_error_of_a_prediction(
    limit: int, slack: int
) -> None:
    limits = Limits(limit, 0)
    for excess in (0, slack, slack + 1):
        whole = outcome(PROGRAM, limit + excess, predicted_to_fit=False)
        explored = Explored(PROGRAM, whole.target, limits, whole.planned, False)
        assert explored.fits == (excess <= slack)


def planned(program: Program, plan: Plan | None = None) -> Outcome:
    plain = scheduled()
    return replace(outcome(program, 90), planned=PlannedModule(plain, plain, plan))


def test_the_step_as_it_is_has_no_plan() -> None:
    assert planned(PROGRAM).plan is None


def test_a_transformed_program_has_one_without_any_of_its_module() -> None:
    result = planned(ON_HOST)
    plan, plain = result.plan, result.planned.plain
    assert plan is not None
    assert plan.transforms == ON_HOST.transforms == (StateOnHost((0,)),) and plan.planner == "none"
    assert plan.fingerprint == plain.module.fingerprint
    assert plan.actions == tuple((Kind.RUN, kernel.name) for kernel in plain.problem.kernels)


def test_a_savedsays_what_the_program_has_on_the_host() -> None:
    saved = Plan(tuple((Kind.RUN, name) for name in WITH_RECOMPUTE), "f00d", "kernels")
    whole, on_host = planned(PROGRAM, saved).plan, planned(ON_HOST, saved).plan
    assert whole is not None and on_host == replace(whole, transforms=ON_HOST.transforms)
    assert (whole.actions, whole.fingerprint, whole.transforms) == (saved.actions, "f00d", ())


def test_a_savedtells_its_program_and_its_kernels() -> None:
    result = planned(PROGRAM, Plan((), "f00d", "kernels"))
    module = result.planned.plain.module
    assert (
        result.plan is not None and result.plan.program == planned(ON_HOST).program.original.digest
    )
    assert result.plan.structure == module.structure
    assert dict(result.plan.kernels) == module.chosen_kernels and result.plan.kernels


def test_a_program_in_slabs_has_a_savedthat_says_which() -> None:
    program = in_slabs()
    result = planned(program)
    assert result.plan is not None and result.plan.planner == result.method == "slabs"
    assert result.plan.transforms == program.transforms
    saved = Plan(tuple((Kind.RUN, name) for name in WITH_RECOMPUTE), "f00d", "kernels")
    assert (
        planned(program, saved).method == "kernels, in slabs"
        and planned(PROGRAM, saved).method == "kernels"
    )
    assert planned(PROGRAM).method == "plain"
