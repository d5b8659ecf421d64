"""Every stage of `memplan.jit` says what the stage of `jax.jit` says of the same step."""

import io
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan import Report, api
from memplan.errors import MemplanError, TimeLimitError
from memplan.planning.registry import OWN
from memplan.planning.schedule import Solution
from memplan.stages import Planned, PlannedJit, Traced
from tests.program.steps import CASES, Case
from tests.test_api import SHAPES, arguments, close, train
from tests.xla.steps import scanned

LIMIT = "50KiB"  # the step takes 70 KiB as it is


def both(case: Case) -> tuple[PlannedJit, Any]:
    return memplan.jit(case.step, **case.options), jax.jit(case.step, **case.options)


class Interrupted:
    """memplan's planner; Ctrl-C is pressed when it plans for the n-th time, inside of XLA."""

    name = "interrupted"

    def __init__(self, number: int):
        self.left = number

    def plan(self, *args: Any) -> Solution:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return OWN.plan(*args)


def half(planner: Interrupted | None = None) -> tuple[PlannedJit, Any]:
    """A scan within half of what it takes: the first choice of residuals fits, more are planned."""
    step, args = scanned(64, 8)
    whole = memplan.jit(step, donate_argnums=0).plan(*args).report.baseline_peak_bytes
    return memplan.jit(step, budget=whole // 2, planner=planner, donate_argnums=0), args


def test_ctrl_c_while_xla_calls_back_keeps_what_is_in_hand() -> None:
    told = list[str]()
    planned, args = half(Interrupted(3))
    with (
        api.progress(lambda stage, share: told.append(stage)),
        pytest.warns(UserWarning, match="planning was interrupted"),
    ):
        report = planned.plan(*args).report
    assert report.status == "fits" and report.attempts == 1
    assert ": in hand " in told[-3] and told[-2].startswith("interrupted")
    assert told[-1].startswith("compiling the best: ")
    state, _ = jax.tree.map(jnp.copy, planned(*args))
    assert jax.tree.structure(state) == jax.tree.structure(args[0])


def test_ctrl_c_with_nothing_in_hand_is_raised() -> None:
    planned, args = half(Interrupted(1))
    with pytest.raises(KeyboardInterrupt):
        planned.plan(*args)
    assert planned.plan(*args).report.status == "fits"


def test_ctrl_c_between_programs_keeps_what_is_in_hand() -> None:
    pressed = list[str]()

    def press(stage: str, share: float | None) -> None:
        if ": in hand " in stage and not pressed:
            pressed.append(stage)
            raise KeyboardInterrupt

    planned, args = half()
    with api.progress(press), pytest.warns(UserWarning, match="planning was interrupted"):
        assert planned.plan(*args).report.status == "fits"
    assert pressed


def shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)), tree
    )


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_that_of_jit(name: str) -> None:
    case = CASES[name]
    ours, plain = (jitted.trace(*case.make(), **case.kwargs) for jitted in both(case))
    assert isinstance(ours, Traced)
    assert (ours.in_tree, ours.out_tree) == (plain.in_tree, plain.out_tree)
    assert (ours.args_info, ours.donate_argnums) == (plain.args_info, plain.donate_argnums)
    assert shapes(ours.out_info) == shapes(plain.out_info)
    assert (ours.fun_name, str(ours.effects)) == (plain.fun_name, str(plain.effects))
    assert (
        len(ours.jaxpr.eqns) == len(plain.jaxpr.eqns)
        and ours.jaxpr.in_avals == plain.jaxpr.in_avals
    )
    result, expected = (jitted.eval_shape(*case.make(), **case.kwargs) for jitted in both(case))
    assert jax.tree.structure(result) == jax.tree.structure(expected) and shapes(result) == shapes(
        expected
    )


@pytest.mark.parametrize(
    "name", ["static among many", "donated by name", "keyword arguments", "shardings", "scan"]
)
def test_what_is_lowered_and_compiled_is_that_of_jit(name: str) -> None:
    case = CASES[name]
    ours, plain = (jitted.lower(*case.make(), **case.kwargs) for jitted in both(case))
    assert isinstance(ours, Planned)
    assert (ours.in_tree, ours.out_tree, ours.donate_argnums) == (
        plain.in_tree,
        plain.out_tree,
        plain.donate_argnums,
    )
    assert ours.args_info == plain.args_info
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), ours.out_info) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), plain.out_info
    )
    assert ours.as_text() == plain.as_text()
    assert ours.as_text("hlo").startswith("HloModule") and "loc(" in ours.as_text(debug_info=True)
    assert ours.cost_analysis() == plain.cost_analysis()
    run, jaxs = ours.compile(), plain.compile()
    assert (run.in_tree, run.out_tree, run.donate_argnums) == (
        jaxs.in_tree,
        jaxs.out_tree,
        jaxs.donate_argnums,
    )
    assert run.input_shardings == jaxs.input_shardings
    assert run.output_shardings == jaxs.output_shardings
    stats, expected = run.memory_analysis(), jaxs.memory_analysis()
    assert stats.argument_size_in_bytes == expected.argument_size_in_bytes
    assert stats.temp_size_in_bytes == expected.temp_size_in_bytes
    assert stats.alias_size_in_bytes == expected.alias_size_in_bytes
    assert run.cost_analysis() == jaxs.cost_analysis()


class TestPlanned:
    def test_lower_and_trace_lead_to_the_plan(self) -> None:
        step = memplan.jit(train, budget=LIMIT)
        planned = step.plan(*SHAPES)
        assert planned.plan is not None
        assert step.lower(*arguments()) is planned and step.trace(*arguments()).lower() is planned
        assert planned.cost_analysis() == jax.jit(train).lower(*SHAPES).cost_analysis()

    def test_the_compiled_step_counts_what_is_planned(self) -> None:
        run, plain = (
            memplan.jit(train, budget=LIMIT).lower(*SHAPES).compile(),
            jax.jit(train).lower(*SHAPES).compile(),
        )
        stats = run.memory_analysis()
        assert stats.temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes
        assert (
            stats.temp_size_in_bytes + stats.argument_size_in_bytes
            <= run.report.compiled_peak_bytes
        )
        assert run.cost_analysis()["flops"] > plain.cost_analysis()["flops"]

    def test_an_argument_that_is_not_read_has_no_sharding(self) -> None:
        step = (
            memplan.jit(lambda x, unread: {"y": 2 * x})
            .lower(jnp.ones(3), {"u": jnp.ones(4)})
            .compile()
        )
        (x, unread), kwargs = step.input_shardings
        assert x == step.output_shardings["y"] and unread == {"u": None} and kwargs == {}

    def test_other_compiler_options_plan_again(self) -> None:
        planned = memplan.jit(
            train, budget=LIMIT, compiler_options={"xla_cpu_enable_fast_math": False}
        ).lower(*SHAPES)
        again = planned.compile(compiler_options={"xla_backend_optimization_level": 0})
        assert (
            planned.compile({}).report == planned.report
            and again.report.compiled_peak_bytes <= 50 << 10
        )
        close(jax.jit(train)(*arguments()), again(*arguments()))
        with pytest.raises(MemplanError, match="No such compile option: 'xla_nonsense'"):
            planned.compile({"xla_nonsense": 1})

    def test_a_trace_is_for_the_device_that_was_asked_for(self) -> None:
        with pytest.raises(MemplanError, match="device="):
            memplan.jit(train).trace(*SHAPES).lower(lowering_platforms=("cuda",))

    def test_numbers_are_compared_on_the_arrays_of_a_trace(self) -> None:
        step = memplan.jit(train, budget=LIMIT, verify="numbers")
        assert step.trace(*arguments()).lower().report.status == "fits"
        step.clear_cache()
        with pytest.raises(MemplanError, match="pass arrays"):
            step.trace(*SHAPES).lower()

    @pytest.mark.gpu_aot
    def test_of_an_absent_gpu_the_text_is_told_but_no_cost(self) -> None:
        step = memplan.jit(train, device="v100")
        planned = step.lower(*SHAPES)
        assert planned.cost_analysis() is None and "stablehlo.sine" in planned.as_text()
        assert step.report.device == planned.report.device == "v100"
        close(jax.jit(train)(*arguments()), step(*arguments()))
        assert step.report.device == "v100"


class TestReport:
    def test_it_is_of_the_plan_with_the_largest_arguments(self) -> None:
        step = memplan.jit(train)
        with pytest.raises(MemplanError, match="nothing was planned yet"):
            _ = step.report
        for batch in (64, 256, 17):
            step(*arguments(batch))
        assert isinstance(step.report, Report)
        assert (
            step.report.compiled_peak_bytes == step.plan(*arguments(256)).report.compiled_peak_bytes
        )

    @pytest.mark.gpu_aot
    def test_it_is_of_what_runs_if_nothing_was_planned_for_the_absent_gpu(self) -> None:
        step = memplan.jit(train, device="v100", budget="1GiB")
        step(*arguments())
        assert step.report.device == "cpu" and step.report.budget_bytes == 1 << 30


def test_after_clear_cache_the_step_is_traced_again() -> None:
    factor = [2.0]
    ours, plain = memplan.jit(lambda x: factor[0] * x), jax.jit(lambda x: factor[0] * x)
    for step in (ours, plain):
        assert step(3.0) == 6
        factor[0] = 5.0
        assert step(3.0) == 6
        step.clear_cache()
        assert step(3.0) == 15 and step.lower(3.0).compile()(3.0) == 15
        factor[0] = 2.0


def test_a_jitted_step_is_planned_by_every_name() -> None:
    step = memplan.jit(jax.jit(train), budget=LIMIT)
    assert isinstance(step.lower(*SHAPES), Planned) and isinstance(step.trace(*SHAPES), Traced)
    np.testing.assert_array_equal(
        step(*arguments())[1]["loss"], jax.jit(train)(*arguments())[1]["loss"]
    )


def test_a_time_limit_ends_planning_and_the_report_says_so() -> None:
    step, args = scanned(64, 8)
    whole = memplan.jit(step, donate_argnums=0).plan(*args).report.baseline_peak_bytes
    options: Any = {"budget": whole // 2, "donate_argnums": 0, "time_limit": 1e-6}
    with pytest.raises(
        TimeLimitError, match=r"time limit of 1e-06 s .* 1 program .*(?s:.*)Try:"
    ) as out:
        memplan.jit(step, **options).plan(*args)
    assert whole // 2 < out.value.smallest_bytes <= whole
    report = memplan.jit(step, verify=None, **options).plan(*args).report
    assert report.ended_by == "time limit" and "planning ended by" in str(report)


@pytest.mark.parametrize("time_limit", [0, -1, float("nan"), True, "5min"])
def test_a_time_limit_is_a_number_of_seconds(time_limit: Any) -> None:
    with pytest.raises(MemplanError, match=r"time_limit is .*a number of seconds above 0"):
        memplan.jit(lambda x: x, time_limit=time_limit)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "count"), [(Terminal, 1), (io.StringIO, 0)])
def test_a_terminal_shows_the_stages_unless_a_callback_does(
    monkeypatch: pytest.MonkeyPatch, terminal: Any, count: int
) -> None:
    bars = list[Any]()

    class Bar:
        def __init__(self, console: Any):
            bars.append(self)
            self.stages = list[str]()

        def __enter__(self) -> Any:
            return lambda stage, share: self.stages.append(stage)

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr("memplan.stages.Stages", Bar)
    monkeypatch.setattr("sys.stderr", terminal())
    memplan.jit(train).plan(*SHAPES)
    assert [bar.stages for bar in bars] == [["tracing", "exploring the step"]] * count
    with api.progress(lambda stage, share: None):
        memplan.jit(train).plan(*SHAPES)
    assert len(bars) == count


def test_the_log_has_stages_and_outcomes_and_for_debugging_programs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # import-linter, run by another test, disables the loggers of the process
    monkeypatch.setattr(logging.getLogger("memplan"), "disabled", False)
    with caplog.at_level("DEBUG", logger="memplan"):
        memplan.jit(train, budget=LIMIT).plan(*SHAPES)
    levels = {
        level: [r.getMessage() for r in caplog.records if r.levelname == level]
        for level in ("INFO", "DEBUG")
    }
    assert levels["INFO"][:2] == ["tracing", "exploring the step"]
    assert levels["INFO"][-1].startswith("train: fits, ")
    assert levels["DEBUG"] and all("fit" in line for line in levels["DEBUG"])
