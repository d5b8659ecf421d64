"""`memplan.jit` is `jax.jit` with a budget: the same calls, the same errors, and its own where jax has none."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan import (
    InfeasibleBudgetError,
    MemplanError,
    PlanMismatchError,
    UnsupportedProgramError,
    api,
    pipeline,
)
from memplan.errors import WrongProgramError
from memplan.stages import Planned
from memplan.verify.numbers import Gate, Leaf
from tests import vocabulary
from tests.arrays import shapes_of

LAYERS, WIDTH, BATCH = 4, 8, 256


def loss(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.sin(x @ weight)
    return (x * x).mean()


def train(weights: Any, x: jax.Array, rate: float = 0.1) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), {
        "loss": value,
        "rate": rate,
    }


def arguments(batch: int = BATCH) -> tuple[Any, jax.Array]:
    return [0.9 * jnp.eye(WIDTH) + number / 100 for number in range(LAYERS)], jnp.ones(
        (batch, WIDTH)
    ) / 3


SHAPES = shapes_of(arguments())


def close(expected: Any, results: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(results)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=1e-6
        )


@pytest.fixture(scope="module")
def baseline() -> int:
    return memplan.jit(train).plan(*SHAPES).report.baseline_peak_bytes


@pytest.fixture(scope="module")
def tight(baseline: int) -> int:
    """A budget that only a plan keeps."""
    return baseline * 6 // 10


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every planning."""
    calls: list[Any] = []
    original = pipeline.run

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(pipeline, "run", counted)
    return calls


class TestLikeJit:
    @pytest.mark.parametrize("share", [1.0, 0.6], ids=["untouched", "planned"])
    def test_a_call_gives_what_jit_gives(self, baseline: int, share: float) -> None:
        step = memplan.jit(train, budget=int(baseline * share))
        close(jax.jit(train)(*arguments()), step(*arguments()))
        close(jax.jit(train)(*arguments(), rate=0.5), step(*arguments(), rate=0.5))

    def test_it_decorates_with_and_without_arguments(self) -> None:
        @memplan.jit
        def bare(x: Any) -> Any:
            """Doubles."""
            return 2 * x

        @memplan.jit(budget="1GiB")
        def called(x: Any) -> Any:
            return 2 * x

        assert bare(2.0) == called(2.0) == 4
        assert (bare.__name__, bare.__doc__) == ("bare", "Doubles.")

    def test_a_method_gets_its_instance(self) -> None:
        class Model:
            scale = 3.0

            @memplan.jit(static_argnums=0)
            def scaled(self, x: Any) -> Any:
                return self.scale * x

        assert Model().scaled(2.0) == 6

    def test_every_static_value_is_a_program_of_its_own(self, runs: list[Any]) -> None:
        for options in ({"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -1}):
            step = memplan.jit(lambda x, n: x * n, **options)
            assert [float(step(2.0, n)) for n in (3, 4, 3)] == [6, 8, 6]
        assert len(runs) == 6

    def test_a_strong_number_is_no_weak_one(self) -> None:
        step, half = memplan.jit(lambda x, s: x * s), jnp.ones(3, jnp.bfloat16)
        for number in (2.0, np.float32(2), 2.0, jnp.float32(2), 2):
            close(jax.jit(lambda x, s: x * s)(half, number), step(half, number))

    def test_a_counter_that_begins_as_a_python_number_is_planned_once(
        self, runs: list[Any]
    ) -> None:
        step = memplan.jit(lambda count, x: (count + 1, count * x))
        count: Any = 0
        for expected in (0, 1, 2):
            count, y = step(count, jnp.ones(3))
            close(y, expected * jnp.ones(3))
        assert len(runs) == 1

    def test_keys_are_arguments_like_others(self, runs: list[Any]) -> None:
        def noisy(key: Any, x: jax.Array) -> Any:
            y = x + jax.random.normal(key, x.shape)
            for _ in range(4):
                y = jnp.sin(y @ jnp.ones((64, 64)))
            return jax.random.split(key)[0], y

        step, plain = memplan.jit(noisy, donate_argnums=0), jax.jit(noisy)
        key, x = jax.random.key(0), jnp.ones((100, 64))
        again = jax.random.key(0)
        for _ in range(2):
            (key, y), (again, z) = step(key, x), plain(again, x)
            close(z, y)
        assert len(runs) == 1

    def test_donated_arguments_are_consumed(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight, donate_argnums=0)
        weights, x = arguments()
        new, _ = step(weights, x)
        assert all(leaf.is_deleted() for leaf in weights)
        assert not x.is_deleted()
        step(new, x)

    def test_kwargs_trees_and_none(self, tight: int) -> None:
        def step(*, state: Any, x: Any) -> Any:
            return {"new": train(state["w"], x), "none": None, "n": state["n"] + 1}

        state = {"w": arguments()[0], "n": jnp.int32(3)}
        planned = memplan.jit(step, budget=tight)
        close(jax.jit(step)(state=state, x=arguments()[1]), planned(state=state, x=arguments()[1]))

    def test_shardings_and_compiler_options_are_passed_on(self, tight: int) -> None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        options = {"xla_cpu_enable_fast_math": False}
        for budget in (None, tight):
            shardings = {"in_shardings": sharding, "out_shardings": sharding}
            step = memplan.jit(train, budget=budget, compiler_options=options, **shardings)
            close(jax.jit(train)(*arguments()), step(*arguments()))

    def test_wrong_arguments_are_type_errors(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight)
        step(*arguments())
        with pytest.raises(TypeError):
            step(arguments()[0])
        with pytest.raises(TypeError):
            step(*arguments(), nonsense=1)
        compiled = step.plan(*SHAPES).compile()
        with pytest.raises(TypeError):
            compiled(arguments()[0][0], arguments()[1])
        with pytest.raises(TypeError):
            compiled(*arguments(batch=3))
        close(jax.jit(train)(*arguments()), step(*arguments()))

    def test_errors_of_the_step_come_through(self) -> None:
        @memplan.jit
        def step(x: Any) -> Any:
            raise KeyError("mine")

        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                step(1.0)


class TestStages:
    def test_plan_and_compile(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight)
        planned = step.plan(*SHAPES)
        assert repr(planned) == "<memplan.Planned train: fits>"
        assert "_report" not in vars(planned)  # which may compile the plain step
        compiled = planned.compile()
        close(jax.jit(train)(*arguments()), compiled(*arguments()))
        assert compiled.report.compiled_peak_bytes == planned.report.compiled_peak_bytes
        assert "is_scheduled=true" in planned.compile().as_text()

    def test_the_report(self, baseline: int, tight: int) -> None:
        report = memplan.jit(train, budget=tight).plan(*SHAPES).report
        assert report.status == "fits"
        assert report.budget_bytes == tight
        assert report.baseline_peak_bytes == baseline > tight
        assert report.floor_bytes <= report.compiled_peak_bytes <= tight
        assert report.predicted_peak_bytes > 0
        assert report.observed_peak_bytes is None
        assert report.predicted_peak_bytes == report.compiled_peak_bytes
        assert report.attempts == 1
        assert report.planner == "kernels"
        assert report.recomputations_found
        sources = [decision.source for decision in report.decisions]
        assert sources and all("test_api.py:" in source for source in sources if source)
        assert {choice.decision for choice in report.decisions} <= {"keep", "offload", "recompute"}

    def test_a_budget_at_the_baseline_leaves_the_step_alone(self, baseline: int) -> None:
        for budget in (baseline, baseline + 1, None, "100%"):
            planned = memplan.jit(train, budget=budget).plan(*SHAPES)
            assert planned.plan is None
            assert planned.report.planner == "none"
            assert planned.report.compiled_peak_bytes == baseline
            assert planned.report.status == "untouched"

    def test_one_byte_less_does_not(self, baseline: int) -> None:
        planned = memplan.jit(train, budget=baseline - 1).plan(*SHAPES)
        assert planned.plan is not None
        assert planned.report.compiled_peak_bytes < baseline

    def test_a_plan_is_saved_loaded_and_followed(self, tight: int, tmp_path: Path) -> None:
        planned = memplan.jit(train, budget=tight).plan(*SHAPES)
        planned.plan.save(tmp_path / "plan.json")
        followed = memplan.jit(
            train, budget=tight, plan=memplan.Plan.load(tmp_path / "plan.json")
        ).plan(*SHAPES)
        assert followed.plan == planned.plan
        assert followed.report.compiled_peak_bytes == planned.report.compiled_peak_bytes
        close(jax.jit(train)(*arguments()), followed.compile()(*arguments()))

    def test_a_plan_for_another_program_is_refused(self, tight: int) -> None:
        plan = memplan.jit(train, budget=tight).plan(*SHAPES).plan
        with pytest.raises(PlanMismatchError):
            memplan.jit(train, budget=tight, plan=plan).plan(*arguments(batch=17))
        with pytest.raises(PlanMismatchError):
            memplan.jit(lambda w, x: loss(w, x), plan=plan)(*arguments())

    def test_a_plan_holds_no_arrays(self, tight: int) -> None:
        weights, x = arguments()
        references = [weakref.ref(leaf) for leaf in (*weights, x)]
        step = memplan.jit(train, budget=tight)
        planned = step.plan(weights, x)
        compiled = planned.compile()
        step(weights, x)
        del weights, x
        gc.collect()
        assert not any(reference() is not None for reference in references)
        close(jax.jit(train)(*arguments()), compiled(*arguments()))

    def test_progress_is_told_inside_the_block_only(self, tight: int) -> None:
        stages: list[str] = []
        from_api = memplan.api.progress  # type: ignore[attr-defined]
        with from_api(lambda stage, share: stages.append(stage)):
            memplan.jit(train, budget=tight).plan(*SHAPES)
        count = len(stages)
        assert stages[0] == "tracing"
        memplan.jit(train).plan(*SHAPES)
        assert len(stages) == count


class TestPlanningOnce:
    def test_a_second_call_does_not_plan(self, tight: int, runs: list[Any]) -> None:
        step = memplan.jit(train, budget=tight)
        weights, x = arguments()
        for _ in range(3):
            weights, _ = step(weights, x)  # what came out goes in again
        step(weights, np.asarray(x))
        assert len(runs) == 1

    def test_python_numbers_do_not_plan_again(self, tight: int, runs: list[Any]) -> None:
        step = memplan.jit(train, budget=tight)
        for rate in (0.1, 0.2, 0.3):
            step(*arguments(), rate)
        assert len(runs) == 1

    def test_threads_that_call_at_once_plan_once(self, tight: int, runs: list[Any]) -> None:
        step = memplan.jit(train, budget=tight)
        barrier = threading.Barrier(4)

        def call() -> Any:
            barrier.wait(10)
            return step(*arguments())

        with ThreadPoolExecutor(4) as threads:
            results = [future.result() for future in [threads.submit(call) for _ in range(4)]]
        assert len(runs) == 1
        for result in results:
            close(jax.jit(train)(*arguments()), result)

    def test_other_shapes_and_dtypes_plan_anew(self, runs: list[Any]) -> None:
        step = memplan.jit(lambda x: x + 1)
        for x in (
            jnp.ones(3),
            jnp.ones(4),
            jnp.ones(3, jnp.bfloat16),
            jnp.ones(3),
            [jnp.ones(3)][0],
        ):
            assert step(x).shape == x.shape
        assert len(runs) == 3

    def test_errors_leave_nothing_behind(self, tight: int, runs: list[Any]) -> None:
        step = memplan.jit(train, budget=tight)
        with pytest.raises(InfeasibleBudgetError):
            step(*arguments(batch=16 * BATCH))
        assert not step._planned
        close(jax.jit(train)(*arguments()), step(*arguments()))
        with pytest.raises(InfeasibleBudgetError):
            step(*arguments(batch=16 * BATCH))
        assert len(step._planned) == 1


class TestRequests:
    def test_unknown_options_are_type_errors_at_once(self) -> None:
        with pytest.raises(TypeError, match=r"frontier has no argument verify"):
            memplan.largest(lambda size: (train, SHAPES), low=1, high=2, verify=None)

    @pytest.mark.parametrize("split", [True, None, "always", 2, ("auto",)])
    def test_another_way_to_split_is_refused_at_once(self, split: Any) -> None:
        for ask in (
            lambda: memplan.jit(train, split=split),
            lambda: memplan.jit(split=split)(train),
            lambda: memplan.largest(lambda size: (train, SHAPES), low=1, high=2, split=split),
            lambda: api.compare(train, SHAPES, split=split),
            lambda: api.curve(train, SHAPES, split=split),
        ):
            with pytest.raises(MemplanError, match=r"one of 'auto', False"):
                ask()

    def test_a_share_is_of_the_device(self) -> None:
        report = memplan.jit(train, budget="50%").plan(*SHAPES).report
        whole = memplan.jit(train).plan(*SHAPES).report
        assert report.budget_bytes == whole.budget_bytes // 2

    def test_a_budget_of_nothing_says_what_works(self) -> None:
        with pytest.raises(InfeasibleBudgetError) as caught:
            memplan.jit(train, budget=0).plan(*SHAPES)
        error = caught.value
        assert 0 < error.floor_bytes <= error.smallest_bytes
        assert "test_api.py:" in error.operation
        assert error.operation in str(error)
        assert str(error.smallest_bytes) in str(error)
        planned = memplan.jit(train, budget=error.smallest_bytes).plan(*SHAPES)
        assert planned.report.compiled_peak_bytes <= error.smallest_bytes

    def test_a_budget_above_the_floor_that_nothing_keeps_says_what_works(self) -> None:
        def step(x: jax.Array) -> Any:
            return jnp.fft.rfft(jnp.sin(x)), x @ x

        x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        with pytest.raises(InfeasibleBudgetError) as caught:
            memplan.jit(step, budget=1).plan(x)
        assert memplan.jit(step, budget=caught.value.smallest_bytes).plan(x).report.status == "fits"


@pytest.fixture(scope="module")
def in_slabs() -> Planned:
    step = memplan.jit(vocabulary.step, budget=vocabulary.IN_SLABS, donate_argnums=0)
    return step.plan(*vocabulary.shapes())


class TestSlabs:
    def test_what_fits_in_no_other_way_runs_in_slabs_with_the_numbers_of_the_step(
        self, in_slabs: Planned
    ) -> None:
        args = vocabulary.arguments()
        assert in_slabs.report.status == "fits" and in_slabs.report.slab_loops
        close(jax.jit(vocabulary.step)(*args), in_slabs.compile()(*args))

    def test_a_saved_plan_is_followed_to_the_same_module(
        self, in_slabs: Planned, tmp_path: Path
    ) -> None:
        assert in_slabs.plan is not None and in_slabs.plan.transforms
        in_slabs.plan.save(tmp_path / "plan.json")
        saved = memplan.Plan.load(tmp_path / "plan.json")
        second = memplan.jit(vocabulary.step, plan=saved, donate_argnums=0, split=False).plan(
            *vocabulary.shapes()
        )
        assert second.plan == in_slabs.plan
        assert second.report.slab_loops == in_slabs.report.slab_loops
        with pytest.raises(PlanMismatchError, match=r"does not have|made for program"):
            memplan.jit(train, plan=saved).plan(*SHAPES)

    def test_without_them_the_error_advises_them(self) -> None:
        step = memplan.jit(
            vocabulary.step, budget=vocabulary.IN_SLABS, donate_argnums=0, split=False
        )
        with pytest.raises(InfeasibleBudgetError, match='split="auto"') as caught:
            step.plan(*vocabulary.shapes())
        assert caught.value.floor_bytes > vocabulary.IN_SLABS

    @pytest.mark.parametrize(
        "step", [lambda x: x + 1, lambda x: jnp.sort(x[None])], ids=["sum", "sort"]
    )
    def test_where_there_is_nothing_to_split_nothing_is(self, step: Any) -> None:
        with pytest.raises(InfeasibleBudgetError) as caught:
            memplan.jit(step, budget=1).plan(jnp.ones(()))
        assert "slab" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:a step planned by memplan.jit was called inside another")
class TestInsideOthers:
    def test_inside_jit_it_is_inlined_with_a_warning(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight)

        def outer(weights: Any, x: jax.Array) -> Any:
            new, metrics = step(weights, x + 1)
            return new, metrics["loss"] * 2

        def plain(weights: Any, x: jax.Array) -> Any:
            new, metrics = train(weights, x + 1)
            return new, metrics["loss"] * 2

        with pytest.warns(UserWarning, match="Decorate the outermost step"):
            results = jax.jit(outer)(*arguments())
        close(jax.jit(plain)(*arguments()), results)

    def test_inside_scan(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight)

        def epoch(step: Callable[..., Any], weights: Any, x: jax.Array) -> Any:
            return jax.lax.scan(lambda w, _: (step(w, x)[0], None), weights, length=3)[0]

        close(epoch(train, *arguments()), epoch(step, *arguments()))
        close(epoch(train, *arguments()), jax.jit(lambda w, x: epoch(step, w, x))(*arguments()))

    def test_inside_another_planned_step(self, tight: int) -> None:
        inner = memplan.jit(train, budget=tight)
        outer = memplan.jit(lambda w, x: inner(w, x), budget="50%")
        close(jax.jit(train)(*arguments()), outer(*arguments()))

    def test_shapes_can_be_asked_for(self, tight: int) -> None:
        assert jax.eval_shape(memplan.jit(train, budget=tight), *arguments())[1]["loss"].shape == ()

    @pytest.mark.parametrize("share", [1.0, 0.6], ids=["untouched", "planned"])
    @pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_under_grad_and_vmap_it_says_where_to_stand(
        self, baseline: int, share: float, around: Any
    ) -> None:
        step = memplan.jit(loss, budget=int(baseline * share))
        weights, x = arguments()
        with pytest.raises(UnsupportedProgramError, match="Decorate the outermost step"):
            around(jax.grad(step))(weights, x)
        with pytest.raises(UnsupportedProgramError, match="vmap"):
            around(jax.vmap(step, in_axes=(None, 0)))(weights, jnp.stack([x, x]))

    def test_what_it_was_inlined_into_keeps_its_rules(self) -> None:
        @jax.custom_jvp
        def special(x: jax.Array) -> jax.Array:
            return jnp.sin(jnp.cos(x @ x)).sum()

        special.defjvp(lambda primals, tangents: (special(*primals), 7.0 * tangents[0].sum()))
        planned = memplan.jit(special)
        np.testing.assert_allclose(jax.grad(jax.jit(lambda x: planned(x)))(jnp.ones((16, 16))), 7.0)

    def test_concrete_values_inside_a_transform_are_no_transform(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight)
        weights, x = arguments()
        gradient = jax.grad(lambda scale: scale * step(weights, x)[1]["loss"])(2.0)
        np.testing.assert_allclose(gradient, loss(weights, x), rtol=1e-5)


class TestVerify:
    def test_numbers_pass_on_arrays(self, tight: int) -> None:
        step = memplan.jit(train, budget=tight, verify="numbers", donate_argnums=0)
        weights, x = arguments()
        planned = step.plan(weights, x)
        assert planned.plan is not None
        assert not any(leaf.is_deleted() for leaf in weights)
        close(jax.jit(train)(*arguments()), step(weights, x))

    def test_other_numbers_are_refused(self, tight: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memplan.stages.numbers_gate", lambda *_: Gate((Leaf(0.0, 1.0, 0.0),)))
        step = memplan.jit(train, budget=tight, verify="numbers")
        with pytest.raises(WrongProgramError, match="results beyond tolerance"):
            step(*arguments())
        assert not step._planned

    def test_none_takes_what_the_first_compilation_gives(self, tight: int) -> None:
        planned = memplan.jit(train, budget=tight, verify=None).plan(*SHAPES)
        assert planned.report.attempts == 1
        close(jax.jit(train)(*arguments()), planned.compile()(*arguments()))
        smallest = memplan.jit(train, budget=1, verify=None).plan(*SHAPES)
        assert 1 < smallest.report.compiled_peak_bytes < tight


class TestReport:
    def test_a_step_is_reported_as_it_is_or_within_a_budget(self, tight: int) -> None:
        plain = memplan.jit(train, donate_argnums=0).plan(*SHAPES).report
        default = api.report(train, SHAPES)
        assert (default.planner, default.status) == ("none", "untouched")
        assert (default.compiled_peak_bytes, default.budget_bytes) == (
            plain.compiled_peak_bytes,
            plain.budget_bytes,
        )
        kept = api.report(train, SHAPES, donate_argnums=())
        assert (kept.compiled_peak_bytes or 0) > (default.compiled_peak_bytes or 0)
        planned = api.report(train, SHAPES, budget=tight, donate_argnums=())
        assert (
            planned.status == "fits"
            and (planned.compiled_peak_bytes or 0) <= tight == planned.budget_bytes
        )

    @pytest.mark.gpu_aot
    def test_a_step_that_the_device_does_not_hold_stays_as_it_is(self) -> None:
        array = jax.ShapeDtypeStruct((2**32,), jnp.float32)
        report = api.report(lambda x, y: x + y, (array, array), device="v100")
        assert (report.planner, report.status, report.compiled_peak_bytes) == (
            "none",
            "does not fit",
            2 * 2**34,
        )
        assert report.budget_bytes == 6057 << 21  # 75 %, in the pool's units
        assert "(75% of the device, jax's pool)" in str(report)

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"memplan\.api\.report has no argument budgets"):
            api.report(train, SHAPES, budgets=3)  # type: ignore[call-arg]


class TestReferences:
    @pytest.mark.parametrize("share", [None, 0.6])
    def test_a_step_may_write_into_its_arguments(self, share: float | None) -> None:
        def step(ref: Any, weights: Any, x: jax.Array) -> Any:
            ref[...] += 1
            return train(weights, x), ref[0] * 2

        buffers = [jax.new_ref(jnp.zeros(3)) for _ in range(2)]
        whole = memplan.jit(step).plan(buffers[0], *SHAPES).report.baseline_peak_bytes
        planned = memplan.jit(step, budget=None if share is None else int(share * whole))
        for _ in range(2):
            close(jax.jit(step)(buffers[0], *arguments()), planned(buffers[1], *arguments()))
        np.testing.assert_array_equal(buffers[1][...], 2)


def test_public_names() -> None:
    for name in memplan.__all__:
        assert getattr(memplan, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        memplan.nonsense  # noqa: B018
