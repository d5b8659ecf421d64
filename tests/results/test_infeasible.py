"""The error if no plan fits: the floor, the kernel that sets it, and advice."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan import pipeline
from memplan.compilation.callback import PlannedModule
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.errors import InfeasibleBudgetError
from memplan.hardware.backend import CPU
from memplan.hardware.catalog import named
from memplan.planning.graph import Graph, Op, Value
from memplan.planning.slabs.slabs import SlabGraph, Slabs
from memplan.planning.transforms import StateOnHost
from memplan.program.trace import InSlabs, Program, WithStateOnHost
from memplan.results import infeasible as errors
from memplan.results.infeasible import WorkingBudget, floor_of, infeasible, working_budget
from memplan.stages import Planned
from memplan.xla.target import Executable, Memory
from tests.compilation.modules import LEAST, scheduled
from tests.compilation.outcomes import PROGRAM, outcome
from tests.hlo import read_module


@pytest.fixture(autouse=True)
def floor(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the floor, 60 bytes at first."""

    def to(nbytes: int) -> None:
        monkeypatch.setattr(errors, "floor_of", lambda step: (nbytes, "gemm.1 (model.py:3)"))

    to(60)
    return to


def test_the_error_names_the_floor_its_kernel_and_what_to_try() -> None:
    step = outcome(PROGRAM, 120, host_bytes=70, predicted_to_fit=False)
    error = refusal(step)
    assert isinstance(error, InfeasibleBudgetError)
    assert (error.floor_bytes, error.smallest_bytes) == (60, 120)
    assert error.operation == "gemm.1 (model.py:3)"
    assert "no plan fits 100 B on v100" in str(error) and "a budget of 120 bytes" in str(error)
    assert "takes 120 B, with 70 B on the host" in str(error)
    assert "No order of its kernels takes less than 60 B: arguments" in str(error)
    assert "donate_argnums" not in str(error)  # arguments are a tenth of the budget


def test_donated_state_is_not_advised_to_be_donated() -> None:
    def step(state: jax.Array, x: jax.Array) -> Any:
        return state + x.sum(), (x @ x).sum()

    args = jnp.ones((64, 64)), jnp.ones((32, 32))
    with pytest.raises(InfeasibleBudgetError, match="donate_argnums for the state"):
        memplan.jit(step, budget=1).plan(*args)
    with pytest.raises(InfeasibleBudgetError) as caught:
        memplan.jit(step, budget=1, donate_argnums=0).plan(*args)
    assert "donate_argnums" not in str(caught.value)


def refusal(step: Outcome, splits: bool = True) -> InfeasibleBudgetError:
    """The error that names the step's own bytes, and two seconds."""
    return infeasible(step, WorkingBudget(step.device_bytes, 2.0), splits)


def advice(step: Outcome) -> str:
    return str(refusal(step)).partition("Try:")[2]


def test_large_state_may_be_donated_or_moved_to_the_host() -> None:
    step = outcome(PROGRAM, 120)
    plain = SimpleNamespace(
        device_bytes=500, resident_bytes=51, workspaces={}
    )  # of a budget of 100
    large = replace(step, planned=cast(Any, SimpleNamespace(plain=plain)))
    assert "donate_argnums" in advice(large) and "host_state" in advice(large)
    moved = replace(
        large, program=PROGRAM.transformed(WithStateOnHost(StateOnHost((0,)), frozenset()), None)
    )
    assert "host_state" not in advice(moved)
    on_cpu = replace(
        large, target=cast(Any, SimpleNamespace(device=large.target.device, backend=CPU))
    )
    assert "host_state" not in advice(on_cpu)


def test_arrays_that_the_step_closes_over_may_be_arguments() -> None:
    step = outcome(PROGRAM, 120)
    assert "constants" not in str(refusal(step))
    # The budget is 100, of which arguments and outputs take 50.
    plain = SimpleNamespace(device_bytes=500, resident_bytes=80, workspaces={})
    executable = Executable(None, Memory(120, 0, 40, constant_bytes=30))
    closed = replace(step, planned=cast(Any, SimpleNamespace(plain=plain)), executable=executable)
    said = str(refusal(closed))
    assert "arguments, constants, outputs and the largest kernel" in said
    assert "arguments instead of arrays that the step closes over" in said
    assert "30 B of constants, which can be neither donated nor kept on the host" in said
    assert "donate_argnums" not in said


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_a_large_workspace_is_named_with_its_kernel(nbytes: int) -> None:
    result = "f32[8,8]{1,0}, s8[4096]{0}" if nbytes else "f32[8,8]{1,0}"
    product = f"""HloModule step, is_scheduled=true

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %gemm.1 = ({result}) custom-call(%a, %a), custom_call_target="__cublas$gemm"
  ROOT %c = f32[8,8]{{1,0}} get-tuple-element(%gemm.1), index=0
}}
"""
    step = outcome(PROGRAM, 120, predicted_to_fit=False)
    plain = ScheduledModule(read_module(product), named("v100"))
    planned = cast(Any, SimpleNamespace(plain=plain, predicted_bytes=120))
    error = str(infeasible(replace(step, planned=planned), WorkingBudget(120, 2.0)))
    said = "A library needs 4.0 KiB of workspace for gemm.1." in error
    assert said == bool(nbytes), error


def test_the_smallest_plan_may_be_the_plain_step() -> None:
    step = outcome(PROGRAM, 600)
    works = working_budget(step, lambda budget: step)
    assert infeasible(step, works).smallest_bytes == 500


@pytest.mark.parametrize(
    ("baseline_s", "said"),
    [
        (None, "takes 120 B. With it a step is predicted to take 2.00 s. No order"),
        (0.5, "a step is predicted to take 2.00 s; without a plan, 500 ms. No order"),
        (2.0, "takes 120 B. No order"),
    ],
)
def test_the_error_says_how_long_a_step_takes_within_the_smallest_budget(
    baseline_s: float | None, said: str
) -> None:
    step = outcome(PROGRAM, 120)
    if baseline_s is not None:
        step = replace(step, unmodified=outcome(PROGRAM, 9, seconds=baseline_s).planned.plain)
    error = refusal(step)
    assert said in str(error)
    assert (error.smallest_step_s, error.baseline_step_s) == (2.0, baseline_s)


@pytest.mark.parametrize(
    ("unmodified_bytes", "works", "seconds", "tried"),
    [(195, 195, 3, [120]), (196, 196, 3, [120, 130]), (None, 140, 5, [120, 130, 140])],
)
def test_a_budget_that_works_is_sought_until_the_unmodified_step_takes_little_more(
    unmodified_bytes: int | None, works: int, seconds: float, tried: list[int]
) -> None:
    refused = outcome(in_slabs(), 120)
    if unmodified_bytes is not None:
        unmodified = outcome(PROGRAM, unmodified_bytes, seconds=3).summary
        refused = replace(refused, smallest_unmodified=unmodified)
    takes = {120: 130, 130: 140, 140: 140}
    explored = list[int]()

    def plan_within(budget: int) -> Outcome:
        explored.append(budget)
        step = outcome(in_slabs(), takes[budget], predicted_to_fit=False, seconds=5)
        return replace(step, limits=Limits(budget, 50))

    assert working_budget(refused, plan_within) == WorkingBudget(works, seconds)
    assert explored == tried


def in_slabs(op: str = "", nbytes: int = 0) -> Program:
    """The program in slabs of two rows, with an unsplit operation of so many bytes."""
    values = Value("x", nbytes, (64, 3)), Value("y", 0, (64, 3))
    graph = SlabGraph(
        Graph(values, (Op(op, (0,), (1,), source="net.py:7"),)), frozenset(), {}, {}, {}
    )
    slabs = Slabs(0, 0, 2, frozenset(), frozenset(), frozenset())
    return PROGRAM.transformed(InSlabs(slabs, graph, 0, (), frozenset({0} if op else ())), None)


def attempted(program: Program, device_bytes: int, host_bytes: int = 0) -> Outcome:
    """The unsplit step, which is too large, after this attempt in slabs."""
    attempt = SlabAttempt(program.in_slabs, device_bytes, host_bytes, 1)
    return replace(outcome(PROGRAM, 120), closest_slab_attempt=attempt)


def test_the_error_has_the_bytes_of_slabs_and_the_unsplit_operations() -> None:
    said = " In slabs along dimension 0 of float32[64,3] it takes 130 B"
    assert f"{said}. Try" in str(refusal(attempted(in_slabs(), 130)))
    assert f"{said} and 9 B on the host. Try" in str(refusal(attempted(in_slabs(), 130, 9)))
    # it fits beside 10 bytes
    assert f"{said}. Try" in str(refusal(attempted(in_slabs("sort", 90), 130)))
    whole = attempted(in_slabs("sort", 91), 130)
    assert f"{said}; sort (net.py:7) cannot run in slabs. Try" in str(refusal(whole))
    expected = " In slabs it may take less, but none were expected to fit this budget. Try"
    assert expected in str(refusal(outcome(PROGRAM, 120)))
    assert expected not in str(refusal(outcome(PROGRAM, 120), splits=False))
    (record,) = in_slabs("print", 1).in_slabs
    shown = PROGRAM.transformed(
        replace(record, graph=replace(record.graph, effects=frozenset({0}))), None
    )
    assert f"{said}; print (net.py:7) cannot run in slabs. Try" in str(
        refusal(attempted(shown, 130))
    )


def test_a_larger_host_budget_is_advised_for_slabs() -> None:
    attempt = SlabAttempt(in_slabs().in_slabs, 90, 70, 20)
    step = replace(outcome(in_slabs(), 80, 75), closest_slab_attempt=attempt)
    assert "a budget of" not in advice(step)
    assert "a host_budget of 70 bytes" in advice(step)


def test_slabs_are_advised_if_they_were_off_and_no_order_fits(floor: Any) -> None:
    floor(101)
    step = outcome(PROGRAM, 120)
    assert 'split="auto"' in str(refusal(step, splits=False))
    assert "split=" not in str(refusal(step))
    floor(100)
    assert "split=" not in str(refusal(step, splits=False))


@pytest.mark.gpu_aot
def test_whoever_asks_the_smallest_budget_is_that_of_the_smallest_slabs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jax.nn.logsumexp(hidden @ table, axis=1).sum())(table)

    def planned(budget: int) -> Planned[Any]:
        """Without a search for a budget that works."""
        return memplan.jit(step, budget=budget, device="v100").plan(*args)

    monkeypatch.delattr(pipeline, "explore")
    args = jax.ShapeDtypeStruct((1024, 4), jnp.float32), jax.ShapeDtypeStruct((4, 512), jnp.float32)
    with pytest.raises(InfeasibleBudgetError) as hopeless:
        planned(1)
    smallest = hopeless.value.smallest_bytes
    assert smallest < 100_000  # the logits take 2 MiB
    assert planned(smallest).report.slab_loops
    with pytest.raises(InfeasibleBudgetError) as near:
        planned(98 * smallest // 100)
    assert near.value.smallest_bytes == smallest


@pytest.mark.gpu_aot
def test_without_slabs_the_error_names_the_unsplittable_operations() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.tanh(x), axis=0)[::2].sum()

    with pytest.raises(
        InfeasibleBudgetError, match=r"sort \(\S*test_infeasible.py:\d+\) cannot run in slabs"
    ):
        memplan.jit(step, budget=40_000, device="v100").plan(
            jax.ShapeDtypeStruct((10_000,), jnp.float32)
        )


def test_no_order_goes_below_the_floor() -> None:
    plain = scheduled()
    step = replace(outcome(PROGRAM, 2 * plain.device_bytes), planned=PlannedModule(plain, plain))
    nbytes, operation = floor_of(step)
    assert operation in {kernel.name for kernel in plain.problem.kernels}
    assert plain.resident_bytes < nbytes <= plain.resident_bytes + LEAST
    assert floor_of(replace(step, executable=outcome(PROGRAM, 7).executable))[0] == 7
