"""The largest size whose step fits, compared with planning every size."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan import api, pipeline
from memplan.compilation.limits import Limits
from memplan.errors import InfeasibleBudgetError, SizeError, TimeLimitError
from memplan.report.frontier import Frontier
from memplan.report.result import Interrupted
from memplan.studies.largest import last_fitting
from tests import vocabulary
from tests.dense import step

WIDTH, MIB = 256, 2**20
ROWS = range(256, 2305, 256)
BUDGET = 8 * MIB
LIMITS: dict[str, Any] = {"budget": BUDGET, "host_budget": 0, "device": "v100", "split": False}


def make(rows: int, layers: int = 4) -> tuple[Any, tuple[Any, ...]]:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    return step, (weights, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))


def fits(rows: int, layers: int = 4) -> bool:
    function, args = make(rows, layers)
    planned = memplan.jit(function, **LIMITS, donate_argnums=0)
    try:
        planned.plan(*args)
    except InfeasibleBudgetError:
        return False
    return True


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return api.frontier(make, low=ROWS[0], high=ROWS[-1], step=256, name="rows", **LIMITS)


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_it_agrees_with_planning_every_size(frontier: Frontier) -> None:
    assert [rows for rows in ROWS if fits(rows)] == [
        rows for rows in ROWS if rows <= frontier.largest
    ]
    assert frontier.refused == frontier.largest + 256


@pytest.mark.gpu_aot
def test_the_largest_is_compiled_and_the_others_are_predicted(frontier: Frontier) -> None:
    assert frontier.refused is not None
    inside = frontier.at(frontier.largest)
    outside = frontier.at(frontier.refused)
    assert inside.fits and inside.device_bytes <= BUDGET
    assert not outside.fits and outside.device_bytes > BUDGET
    assert [trial.size for trial in frontier.tried if trial.compilations] == [frontier.largest]
    assert frontier.compilations == inside.compilations == 1
    assert frontier.explorations == sum(trial.explorations for trial in frontier.tried)


def test_if_the_largest_exceeds_its_prediction_the_next_smaller_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = list[int]()
    commit = pipeline.Exploration.commit

    def exceeding(exploration: pipeline.Exploration) -> Any:
        outcome = commit(exploration)
        [rows, _] = outcome.program.traced.args[1].shape
        compiled.append(rows)
        limits = outcome.limits if rows < 3 else Limits(outcome.device_bytes - 1, 0)
        return replace(outcome, limits=limits)

    monkeypatch.setattr(pipeline.Exploration, "commit", exceeding)
    result = api.frontier(make, low=1, high=4, budget="1GiB", host_budget=0)
    assert compiled == [4, 3, 2]
    assert result.largest == 2 and result.refused == 3
    assert {trial.size for trial in result.tried if trial.fits} == {1, 2}


@pytest.mark.gpu_aot
def test_the_range_is_halved(frontier: Frontier) -> None:
    assert len(frontier.tried) <= len(ROWS).bit_length()


@pytest.mark.gpu_aot
def test_it_prints_and_comes_back_from_json(frontier: Frontier) -> None:
    assert Frontier.from_json(frontier.to_json()) == frontier
    text = str(frontier)
    assert str(frontier.largest) in text and "The largest that fits 8.0 MiB on v100" in text


def test_if_all_sizes_fit_the_largest_is_the_last() -> None:
    small = api.frontier(make, low=1, high=3, budget="1GiB", host_budget=0)
    assert small.largest == 3 and small.refused is None
    assert "the range ends" in str(small)
    assert memplan.largest(make, low=1, high=3, budget="1GiB", host_budget=0) == 3


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        memplan.largest(
            lambda rows: make(rows, layers=1), low=1, high=64, budget="1KiB", host_budget=0
        )
    assert caught.value.smallest_bytes > 1024


@pytest.mark.parametrize(
    ("low", "high", "step"),
    [(2, 1, 1), (1, 2, 0), (1, 2, -1), (2, 1, -1), ((1, 1), (2, 2), 1), ((1, 1, 1), (2, 2, 2), 1)],
)
def test_an_invalid_range_is_an_error(low: Any, high: Any, step: Any) -> None:
    with pytest.raises(SizeError):
        memplan.largest(make, low=low, high=high, step=step)


def test_an_error_of_the_maker_names_the_size() -> None:
    def odd(size: int) -> Any:
        raise ValueError("only even sizes")

    with pytest.raises(ValueError, match="only even sizes") as caught:
        memplan.largest(odd, low=1, high=3)
    assert "of size 2" in caught.value.__notes__[0]


def test_a_planned_step_is_refused() -> None:
    with pytest.raises(SizeError, match="plain step"):
        memplan.largest(lambda rows: (memplan.jit(step), make(rows)[1]), low=1, high=3)


def test_slabs_count_unless_split_is_false() -> None:
    tokens = {"low": vocabulary.TOKENS, "high": vocabulary.TOKENS, "budget": vocabulary.IN_SLABS}

    def make(tokens: int) -> tuple[Any, tuple[Any, ...]]:
        return vocabulary.step, vocabulary.shapes(tokens)

    [trial] = api.frontier(make, **tokens).tried
    assert trial.fits and trial.way == "slabs"
    with pytest.raises(InfeasibleBudgetError):
        memplan.largest(make, **tokens, split=False)


@given(count=st.integers(1, 500), fitting=st.integers(0, 500))
def test_bisection_finds_the_last_that_fits_and_tries_both_sides(count: int, fitting: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size < fitting

    last = last_fitting(count, fits)
    assert last == min(fitting, count) - 1
    assert last < 0 or last in tried
    assert last + 1 == count or last + 1 in tried
    assert len(tried) == len(set(tried)) <= math.ceil(math.log2(count + 1))


def studied(monkeypatch: pytest.MonkeyPatch, largest: int, notify: Any, **options: Any) -> Frontier:
    """A search in which sizes up to `largest` fit, without a compilation."""

    def explore(program: Any, *_: Any, **__: Any) -> Any:
        nbytes = 10 if program.input_nbytes[0] <= 4 * largest else 30
        best = SimpleNamespace(
            fits=nbytes == 10,
            device_bytes=nbytes,
            host_bytes=0,
            method="none",
            step_s=0.2,
            unmodified=SimpleNamespace(replay=SimpleNamespace(step_s=0.1)),
            limits=Limits(20, 0),
            target=SimpleNamespace(device=SimpleNamespace(name="v100")),
        )
        return SimpleNamespace(best=best, explorations=1, ended_by="")

    def make(size: int) -> Any:
        return lambda x: x, (jax.ShapeDtypeStruct((size,), jnp.float32),)

    monkeypatch.setattr(pipeline, "explore", explore)
    monkeypatch.setattr("memplan.studies.largest.floor_of", lambda _: (5, "dot"))
    with api.progress(notify):
        return api.frontier(make, low=1, high=15, device="v100", **options)


def press_at(size: int) -> Any:
    def press(stage: str, share: float | None) -> None:
        if stage.startswith(f"size {size}:"):
            raise KeyboardInterrupt

    return press


def test_ctrl_c_hands_over_the_sizes_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted) as caught:
        studied(monkeypatch, 9, press_at(10))
    partial = caught.value.result
    assert isinstance(partial, Frontier)
    assert [trial.size for trial in partial.tried] == [8, 12]
    assert (partial.largest, partial.refused, partial.ended_by) == (8, None, "Ctrl-C")
    assert "not known: Ctrl-C ended the search" in str(partial)


def test_ctrl_c_before_a_size_that_fits_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        studied(monkeypatch, 3, press_at(4))
    assert type(caught.value) is KeyboardInterrupt


def test_a_time_limit_ends_with_the_sizes_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = studied(monkeypatch, 9, lambda *_: None, time_limit=1e-6)
    assert (partial.largest, len(partial.tried), partial.ended_by) == (8, 1, "time limit")
    with pytest.raises(TimeLimitError, match=r"fits 20 B on v100\. 1 program .*takes 30 B"):
        studied(monkeypatch, 3, lambda *_: None, time_limit=1e-6)
