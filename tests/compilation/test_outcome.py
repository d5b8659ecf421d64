"""What was compiled: whether it fits, and the plan that reproduces it."""

from __future__ import annotations

from dataclasses import replace

from memplan.compilation.callback import PlannedModule
from memplan.compilation.outcome import Outcome
from memplan.planning.plan import Plan
from memplan.planning.schedule import Kind
from memplan.program.trace import Program, StateOnHost
from tests.compilation.modules import WITH_RECOMPUTE, scheduled
from tests.compilation.outcomes import PROGRAM, in_slabs, outcome

ON_HOST = PROGRAM.transform(StateOnHost(frozenset({0}), frozenset()), None)


def test_it_fits_where_the_compiler_keeps_both_limits() -> None:
    assert outcome(PROGRAM, 100, 50).fits
    assert not outcome(PROGRAM, 101, 0).fits and not outcome(PROGRAM, 0, 51).fits
    assert outcome(PROGRAM, 100, predicted_to_fit=False).fits


def planned(program: Program, plan: Plan | None = None) -> Outcome:
    plain = scheduled()
    return replace(outcome(program, 90), planned=PlannedModule(plain, plain, plan))


def test_the_step_as_it_is_has_no_plan() -> None:
    assert planned(PROGRAM).plan is None


def test_a_transformed_program_has_one_without_any_of_its_module() -> None:
    found = planned(ON_HOST)
    plan, plain = found.plan, found.planned.plain
    assert plan is not None
    assert plan.on_host == (0,) and plan.planner == "none"
    assert plan.fingerprint == plain.module.fingerprint
    assert plan.actions == tuple((Kind.RUN, kernel.name) for kernel in plain.problem.kernels)


def test_a_plan_says_what_the_program_has_on_the_host() -> None:
    made = Plan(tuple((Kind.RUN, name) for name in WITH_RECOMPUTE), "f00d", "kernels")
    whole, held = planned(PROGRAM, made).plan, planned(ON_HOST, made).plan
    assert whole is not None and held == replace(whole, on_host=(0,))
    assert (whole.actions, whole.fingerprint, whole.on_host) == (made.actions, "f00d", ())


def test_a_plan_tells_its_program_and_its_kernels() -> None:
    found = planned(PROGRAM, Plan((), "f00d", "kernels"))
    module = found.planned.plain.module
    assert found.plan is not None and found.plan.program == planned(ON_HOST).program.original.digest
    assert found.plan.structure == module.structure
    assert dict(found.plan.kernels) == module.chosen_kernels and found.plan.kernels


def test_a_program_in_slabs_has_a_plan_that_says_which() -> None:
    program = in_slabs()
    found = planned(program)
    assert found.plan is not None and found.plan.planner == found.method == "slabs"
    assert found.plan.slabs == tuple(one.slabs for one in program.in_slabs)
    made = Plan(tuple((Kind.RUN, name) for name in WITH_RECOMPUTE), "f00d", "kernels")
    assert planned(program, made).method == "kernels, in slabs" and planned(PROGRAM, made).method == "kernels"
    assert planned(PROGRAM).method == "plain"
