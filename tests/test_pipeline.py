"""From a step to what runs: one compilation, the bytes that were predicted, the bits of the plain step."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import memplan
from memplan import MemplanError, parallel, pipeline
from memplan.errors import BudgetError
from memplan.hardware import catalog
from memplan.pipeline import Outcome
from memplan.planning.search import planner
from memplan.program import candidates
from memplan.program.loops.choose import ResidualChoice
from memplan.program.trace import Program
from memplan.request import Request, limits_of, traced
from memplan.xla import target
from memplan.xla.local import Pools, pools
from memplan.xla.module import Module
from memplan.xla.schema import UnreadableModuleError
from memplan.xla.target import Target
from tests.arrays import assert_same_bits
from tests.cases.within_share import QUICK
from tests.xla.steps import dense, scanned
from tests.xla.test_target import needs_compiler

DONATE = {"donate_argnums": 0}


def run(step: Callable[..., Any], args: Any, request: Request) -> Outcome:
    program = traced(step, args, {}, DONATE, request)
    outcome = pipeline.run(program, request, lambda *_: None)
    assert isinstance(outcome, Outcome)
    return outcome


def planned(
    step: Callable[..., Any], args: Any, share: float, device: str | None = None
) -> Outcome:
    """Within a share of what the step takes as it is."""
    whole = pipeline.best(step, args, {}, DONATE, Request(None, device=device)).device_bytes
    return run(step, args, Request(int(share * whole), device=device))


def same_bits(step: Callable[..., Any], args: Any, outcome: Outcome) -> None:
    assert_same_bits(
        outcome.executable.compiled(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args)
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every compilation of memplan's."""
    calls: list[Any] = []
    original = target.Target.compile

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(args)
        return original(self, *args, **named)

    monkeypatch.setattr(target.Target, "compile", counted)
    return calls


class TestOnce:
    def test_planning_and_calling_compile_once(self, compiled: list[Any]) -> None:
        step, args = dense(64, 6)
        whole = memplan.jit(step, donate_argnums=0).plan(*args).report.baseline_peak_bytes
        assert len(compiled) == 1
        fit = memplan.jit(step, budget=int(0.8 * whole), donate_argnums=0)
        fit.plan(*args)
        state, _ = fit(*args)
        fit(state, args[1])
        assert len(compiled) == 2
        assert fit.plan(*args).plan is not None

    def test_a_step_that_fits_is_compiled_once(self, compiled: list[Any]) -> None:
        step = memplan.jit(lambda x: x + 1)
        for _ in range(2):
            step(jnp.ones(3))
        assert len(compiled) == 1

    def test_every_program_counts_and_the_best_is_compiled(
        self, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def same(all_candidates: candidates.Candidates, _: Any) -> Program:
            step = all_candidates.step
            return replace(step, rewritten=step.jaxpr)

        choice = ResidualChoice(False, (), 0.0, 0, 0.0, False)
        monkeypatch.setattr(candidates.Candidates, "fewer_residuals", lambda *_, **__: choice)
        monkeypatch.setattr(candidates.Candidates, "with_residuals", same)
        step, args = dense(16, 2)
        outcome = pipeline.best(step, args, {}, DONATE, Request(1))
        assert outcome.unmodified is not None
        assert outcome.compilations == 1 and outcome.explorations >= 2
        assert outcome.compilations + outcome.explorations == len(compiled)

    @needs_compiler
    @pytest.mark.gpu_aot
    def test_collectives_take_no_exploration(self, compiled: list[Any]) -> None:
        mesh = AbstractMesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto, AxisType.Auto))
        rows = PartitionSpec("host")

        def local(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, "device")

        summed = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        sharding = NamedSharding(mesh, rows)
        shape = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)
        divided = parallel.data_parallel(lambda w, x: w - x.mean(), mesh)
        for step, args in (
            (summed, (shape,)),
            (divided, (shape, shape)),
            (jnp.sum, (jnp.ones(8),)),
        ):
            compiled_step = memplan.jit(step, device="h100", topology="2x4").plan(*args)
            report = compiled_step.report
            assert report.attempts == 1 and report.explorations == 0 and len(compiled) == 1
            compiled.clear()

    def test_threads_do_not_meet(self) -> None:
        step, args = dense(64, 6)
        outcomes: dict[float, Outcome] = {}

        def run(share: float) -> None:
            outcomes[share] = planned(step, args, share)

        threads = [threading.Thread(target=run, args=(share,)) for share in (0.9, 0.75)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes[0.75].device_bytes < outcomes[0.9].device_bytes


@dataclass(frozen=True)
class Scale:
    """A scale of the loss, as jmp has them: its period is no array."""

    value: Any
    period: int


jax.tree_util.register_dataclass(Scale, data_fields=["value"], meta_fields=["period"])


def accumulating(width: int, layers: int, parts: int) -> tuple[Callable[..., Any], Any]:
    """Gradients of parts of the batch, added up in a scan that holds the whole step."""
    _, ((weights, momentum), x) = dense(width, layers)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, x: jax.Array) -> Any:
        weights, momentum = state

        def loss(weights: list[jax.Array], part: jax.Array) -> jax.Array:
            for weight in weights:
                part = jnp.tanh(part @ weight)
            return (part**2).mean()

        def add(total: Any, part: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(weights, part)
            return jax.tree.map(jnp.add, total, gradient), value

        zeros = jax.tree.map(jnp.zeros_like, weights)
        gradient, values = jax.lax.scan(add, zeros, x.reshape(parts, -1, width))
        updates, momentum = optimizer.update(gradient, momentum)
        return (optax.apply_updates(weights, updates), momentum), values.mean()

    return step, ((weights, momentum), x)


class TestPlans:
    def test_bytes_are_predicted_and_bits_are_kept(self) -> None:
        step, args = dense(64, 6)
        outcome = planned(step, args, 0.75)
        assert outcome.compilations == 1 and outcome.plan is not None
        assert outcome.device_bytes == pytest.approx(outcome.planned.predicted_bytes, rel=0.003)
        assert outcome.planned.result.packing.nbytes == pytest.approx(
            outcome.executable.memory.temp_bytes, rel=0.01
        )
        same_bits(step, args, outcome)

    def test_a_whole_step_in_a_loop_is_planned(self) -> None:
        step, args = accumulating(64, 8, 2)
        outcome = planned(step, args, 0.85)
        kernels = outcome.planned.plain.problem.kernels
        again = [
            kernels[action.number]
            for action in outcome.planned.schedule
            if kernels[action.number].block is not None
        ]
        assert len(again) > sum(kernel.block is not None for kernel in kernels)
        same_bits(step, args, outcome)

    @needs_compiler
    @pytest.mark.gpu_aot
    def test_a_described_gpu_uses_the_host_and_says_so(self) -> None:
        step, args = dense(512, 12)
        outcome = planned(step, args, 0.6, device="v100")
        assert outcome.fits and outcome.device_bytes == pytest.approx(
            outcome.planned.predicted_bytes, rel=0.003
        )
        assert (
            outcome.host_bytes == outcome.planned.predicted_host_bytes <= outcome.limits.host_bytes
        )
        assert outcome.step_s <= 1.3 * outcome.planned.plain.replay.step_s

    @needs_compiler
    @pytest.mark.gpu_aot
    def test_a_saved_plan_meets_other_kernels(self) -> None:
        """As at a job's second start, where XLA times its kernels again: here it is told to take a library's."""
        step, args = dense(512, 4)
        plain = pipeline.best(step, args, {}, DONATE, Request(None, device="a100"))
        budget = int(0.8 * plain.device_bytes)
        first = memplan.jit(step, device="a100", donate_argnums=0, budget=budget).plan(*args)
        assert any("triton" in which for _, which in first.plan.kernels)
        library = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}, "donate_argnums": 0}
        again = memplan.jit(step, device="a100", budget=budget, plan=first.plan, **library)
        with pytest.warns(UserWarning, match=r"different kernels.*triton.*planned again"):
            second = again.plan(*args)
        assert second.report.status == "fits"
        assert second.plan.fingerprint != first.plan.fingerprint
        changed_step = memplan.jit(
            lambda state, x: step(state, x + 1), device="a100", plan=first.plan, **library
        )
        with pytest.raises(memplan.PlanMismatchError):
            changed_step.plan(*args)

    def test_shardings_of_the_step_and_calls_inside_it(self) -> None:
        step, args = dense(64, 6)
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        over = NamedSharding(mesh, PartitionSpec("data"))

        def nested(state: Any, x: jax.Array) -> Any:
            return step(state, jax.jit(lambda x: x * 1, in_shardings=over, out_shardings=over)(x))

        placed = (args[0], jax.device_put(args[1], over))
        same_bits(nested, placed, planned(nested, placed, 0.8))

    def test_pmap_inside(self) -> None:
        step, args = dense(64, 6)
        whole = jax.pmap(step)
        many = jax.tree.map(lambda leaf: leaf[None], args)
        expected = whole(*many)
        plain = memplan.jit(lambda state, x: whole(state, x)).plan(*many).report.baseline_peak_bytes
        fit = memplan.jit(lambda state, x: whole(state, x), budget=int(0.95 * plain))
        assert_same_bits(fit(*many), expected)

    @needs_compiler
    @pytest.mark.gpu_aot
    def test_static_arguments_and_odd_leaves_for_a_described_gpu(self) -> None:
        def step(layers: int, scale: Scale, x: jax.Array, *, mode: str) -> Any:
            for _ in range(layers):
                x = jnp.tanh(x @ x) * scale.value
            return x.sum(), Scale(scale.value * 2, scale.period)

        fit = memplan.jit(step, static_argnums=0, static_argnames="mode", device="v100")
        planned = fit.plan(
            3, Scale(2.0, 100), jax.ShapeDtypeStruct((64, 64), jnp.float32), mode="fast"
        )
        assert planned.report.status == "untouched"

    @needs_compiler
    @pytest.mark.gpu_aot
    @pytest.mark.parametrize("device", [None, "v100"])
    def test_containers_that_check_what_they_hold(self, device: str | None) -> None:
        step, (state, x) = dense(64, 6)

        def scaled(state: Any, picky: Picky, x: jax.Array) -> Any:
            state, value = step(state, x)
            return state, Picky(picky.value * 2), value * picky.value

        args = state, Picky(jnp.float32(2.0)), x
        fit = memplan.jit(scaled, donate_argnums=0, device=device)
        whole = fit.plan(*args).report.baseline_peak_bytes
        share = 0.8 if device is None else 0.98  # the library's scratch memory is most of it
        fit = memplan.jit(scaled, donate_argnums=0, device=device, budget=int(share * whole))
        assert fit.plan(*args).report.status == "fits"
        if device is None:
            expected = jax.jit(scaled)(*args)
            assert_same_bits(fit(*args), expected)


class Picky:
    """As jmp's loss scales, a container that wants numbers."""

    def __init__(self, value: Any):
        if not hasattr(value, "dtype") or type(value).__name__ == "ArgInfo":
            raise TypeError(f"{value} is no number")
        self.value = value


jax.tree_util.register_pytree_node(
    Picky, lambda picky: ((picky.value,), None), lambda _, leaves: Picky(*leaves)
)


class TestPinnedPool:
    """On a GPU that is here the host budget is of pinned memory, and its pool ends somewhere."""

    HERE = Target(catalog.named("v100"), described=False)

    @pytest.fixture(autouse=True)
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memplan.request.host_memory_bytes", lambda: 1000 << 30)
        monkeypatch.setattr("memplan.request.pools", Pools)

    def test_by_default_it_is_what_the_pool_gives(self) -> None:
        assert limits_of(Request(), self.HERE).host_bytes == 64 << 30

    @pytest.mark.parametrize(
        ("budget", "line"), [("70GiB", 70), ("100%", 800), ((64 << 30) + 1, 65)]
    )
    def test_more_is_refused_with_the_line_that_raises_it(self, budget: Any, line: int) -> None:
        with pytest.raises(BudgetError, match=f"export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={line}\n"):
            limits_of(Request(host_budget=budget), self.HERE)

    def test_as_much_is_not(self) -> None:
        assert limits_of(Request(host_budget="64GiB"), self.HERE).host_bytes == 64 << 30

    @pytest.mark.parametrize("host_bytes", [0, 5 << 30])
    def test_an_allocator_without_memory_spaces_is_refused_where_there_are_copies(
        self, host_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @dataclass
        class Found:
            host_bytes: int
            seconds: float = 0.0

        monkeypatch.setattr("memplan.request.target_of", lambda device: self.HERE)
        monkeypatch.setattr(pipeline.Attempts, "explore", lambda *_: None)
        monkeypatch.setattr(pipeline.Attempts, "commit", lambda *_: Found(host_bytes))
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
        if not host_bytes:
            pipeline.best(lambda x: x, [jnp.ones(3)], {}, {}, Request())
            return
        with pytest.raises(
            MemplanError, match=r"with XLA_PYTHON_CLIENT_ALLOCATOR=vmm, .* the 5120.0 MiB"
        ):
            pipeline.best(lambda x: x, [jnp.ones(3)], {}, {}, Request())

    def test_a_gpu_that_is_absent_has_its_pool_elsewhere(self) -> None:
        absent = replace(self.HERE, described=True)
        assert limits_of(Request(host_budget="192GiB"), absent).host_bytes == 192 << 30


class TestDefaultBudget:
    """Without a budget a step may take what a process of jax has on the device."""

    ABSENT = Target(replace(catalog.named("v100"), memory_bytes=16 << 30), described=True)

    def test_on_an_absent_gpu_it_is_jaxs_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memplan.request.pools", Pools)
        limits = limits_of(Request(), self.ABSENT)
        assert (limits.device_bytes, limits.pool_share) == (12 << 30, 0.75)

    @pytest.mark.parametrize(
        ("name", "value", "gib"),
        [
            ("XLA_CLIENT_MEM_FRACTION", "0.5", 8),
            ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.25", 4),
            ("XLA_CLIENT_MEM_FRACTION", "2", 16),
            ("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async", 16),
        ],
    )
    def test_the_environment_may_say_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str, gib: int
    ) -> None:
        monkeypatch.setattr("memplan.request.pools", lambda: pools({name: value}))
        assert limits_of(Request(), self.ABSENT).device_bytes == gib << 30

    def test_a_share_is_one_of_the_devices_memory(self) -> None:
        limits = limits_of(Request("100%"), self.ABSENT)
        assert (limits.device_bytes, limits.pool_share) == (16 << 30, None)

    def test_a_local_gpu_has_its_pools_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memplan.request.pools", Pools)
        limits = limits_of(Request(), replace(self.ABSENT, described=False))
        assert (limits.device_bytes, limits.pool_share) == (16 << 30, None)


class TestErrors:
    def test_what_goes_wrong_inside_the_compiler_is_raised(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("planner")

        monkeypatch.setattr(planner, "plan", broken)
        step, args = dense(64, 6)
        with pytest.raises(MemplanError, match=r"ZeroDivisionError in broken .* planner"):
            planned(step, args, 0.8)

    def test_a_module_that_cannot_be_read_names_the_version(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unreadable(proto: bytes, scheduled: bool) -> Any:
            raise UnreadableModuleError("A new kind of line.")

        monkeypatch.setattr(Module, "read", unreadable)
        with pytest.raises(MemplanError, match=r"jaxlib 0\.1.*A new kind of line"):
            memplan.jit(lambda x: x + 1)(jnp.ones(3))

    def test_the_smallest_budget_works_and_is_not_above_plains(self) -> None:
        step, args = scanned(32, 4)
        whole = pipeline.best(step, args, {}, DONATE, Request()).device_bytes
        with pytest.raises(memplan.InfeasibleBudgetError) as caught:
            run(step, args, Request(1))
        smallest = caught.value.smallest_bytes
        assert caught.value.floor_bytes <= smallest <= whole
        assert "memplan/" not in str(caught.value)
        assert run(step, args, Request(smallest)).device_bytes <= smallest


@pytest.mark.parametrize(("split", "splits"), [("auto", True), (False, False), (0, False)])
def test_split_is_a_choice_of_two(split: str | bool, splits: bool) -> None:
    assert bool(Request(split=split).split) is splits


def attention(weights: Any, x: jax.Array) -> jax.Array:
    tokens = x.reshape(-1, 32, 16)
    scores = (tokens @ weights[0]) @ tokens.swapaxes(1, 2) / 4
    return jnp.tanh(x + (jax.nn.softmax(scores) @ tokens).reshape(x.shape) @ weights[1])


def chosen(weights: Any, x: jax.Array) -> jax.Array:
    """Attention in one of two branches, which slabs of the batch split."""
    deep = lambda x: attention(weights[1], x)  # noqa: E731
    return jax.lax.cond(x[0, 0] < 9, deep, lambda x: jnp.tanh(x @ weights[0][1]), x)


def repeated(weights: Any, x: jax.Array) -> jax.Array:
    """A loop with stacks."""
    return jax.lax.scan(lambda x, w: (attention(w, attention(w, x)), None), x, weights)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "share"), [(chosen, 40), (repeated, 40)])
def test_the_budget_that_an_error_names_works(layers: Any, share: int) -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda weights: (layers(weights, x) ** 2).mean())(
            weights
        )
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), value

    weights = jax.random.normal(jax.random.key(0), (3, 2, 16, 16)) / 8
    args = weights, jax.random.normal(jax.random.key(1), (128, 16))
    options = {"donate_argnums": 0, "compiler_options": QUICK}
    plain = memplan.jit(step, **options).plan(*args).report.baseline_peak_bytes
    budget = plain * share // 100
    works = budget
    try:
        memplan.jit(step, budget=budget, **options).plan(*args)
    except memplan.InfeasibleBudgetError as error:
        works = error.smallest_bytes
    fit = memplan.jit(step, budget=works, **options).plan(*args)
    assert budget <= works <= plain and (fit.report.compiled_peak_bytes or 0) <= works
