"""With jax's persistent cache on, a second start of a program compiles nothing, and nothing is taken for another."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.compilation.callback import Callback
from memplan.planning.registry import OWN
from memplan.planning.search import planner
from memplan.planning.transforms import LoopResiduals
from memplan.stages import Planned
from tests.disk_cache import disk_cache
from tests.xla.steps import dense, scanned

STEP, ARGS = dense(64, 5)
NBYTES = memplan.jit(STEP).plan(*ARGS).report.compiled_peak_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with disk_cache(tmp_path):
        yield tmp_path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the modules that XLA scheduled for memplan."""
    texts, original = list[str](), Callback.__call__

    def call(self: Callback, text: str) -> str | None:
        texts.append(text)
        return original(self, text)

    monkeypatch.setattr(Callback, "__call__", call)
    return texts


def start(
    share: float, step: Callable[..., Any] = STEP, args: Sequence[Any] = ARGS, **options: Any
) -> Planned:
    """As another process would: jax has forgotten what it traced and compiled."""
    jax.clear_caches()
    return memplan.jit(step, budget=int(share * NBYTES), **options).plan(*args)


def results(planned: Planned, args: Sequence[Any] = ARGS) -> list[np.ndarray]:
    return [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(planned.compile()(*jax.tree.map(jnp.array, tuple(args))))
    ]


def same(planned: Planned, reference: Planned, args: Sequence[Any] = ARGS) -> bool:
    return all(
        np.array_equal(*pair)
        for pair in zip(results(planned, args), results(reference, args), strict=True)
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("share", "status", "options"),
    [
        (1.0, "untouched", {}),
        (0.8, "fits", {"donate_argnums": 0}),
        (0.8, "fits", {"verify": None}),
    ],
)
def test_a_second_start_compiles_nothing(
    called: list[str], share: float, status: str, options: Any
) -> None:
    first = start(share, **options)
    assert len(called) == 1 and first.report.status == status
    second = start(share, **options)
    assert len(called) == 1
    assert (
        second.report == first.report and second.plan == first.plan and repr(second) == repr(first)
    )
    assert same(first, second)


@pytest.mark.usefixtures("folder")
def test_loops_that_were_rewritten_are_found_again(called: list[str]) -> None:
    step, args = scanned(64, 24)
    whole = memplan.jit(step).plan(*args).report.compiled_peak_bytes
    called.clear()
    first = start(0.35 * whole / NBYTES, step, args)
    assert isinstance(first.plan.transforms[0], LoopResiduals)
    compiled = len(called)
    second = start(0.35 * whole / NBYTES, step, args)
    assert len(called) == compiled and second.plan == first.plan and same(first, second, args)


@pytest.mark.usefixtures("folder")
def test_nothing_is_taken_for_another(called: list[str]) -> None:
    """Another budget, other constants, a choice of the user's: each is compiled, and right."""
    scales = jnp.full(64, 2.0), jnp.full(64, 3.0)
    steps = [STEP, *(lambda state, x, scale=scale: STEP(state, x * scale) for scale in scales)]
    wanted = [
        (0.9, STEP, {}), (0.8, STEP, {}), (0.8, STEP, {"split": False}), (0.8, STEP, {"donate_argnums": 0}),
        (0.8, steps[1], {}), (0.8, steps[2], {}),
    ]  # fmt: skip
    plain = {step: [*map(np.asarray, jax.tree.leaves(jax.jit(step)(*ARGS)))] for step in steps}
    for number, (share, step, options) in enumerate(wanted, 1):
        planned = start(share, step, **options)
        assert len(called) == number and planned.report.compiled_peak_bytes <= int(share * NBYTES)
        assert all(
            np.array_equal(*pair) for pair in zip(results(planned), plain[step], strict=True)
        )


def test_without_the_executable_the_plan_is_followed_and_without_the_plan_all_is_done_again(
    folder: Path, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(0.8)

    def refuse(*_: Any) -> Any:
        raise AssertionError("planned again")

    for lost, number in (("memplan_*", 2), ("memplan-*", 3)):
        for path in folder.glob(lost):
            path.unlink()
        with monkeypatch.context() as patched:
            if lost == "memplan_*":
                patched.setattr(planner, "plan", refuse)
            again = start(0.8)
        assert len(called) == number and again.plan == first.plan and same(first, again)
    assert same(first, start(0.8)) and len(called) == 3  # the plan that was made again is kept


@pytest.mark.usefixtures("folder")
def test_a_planner_of_the_users_plans_again(called: list[str]) -> None:
    """Its code may change under its name."""

    class Own:
        name, plan = "own", staticmethod(OWN.plan)

    for number in (1, 2):
        start(0.8, planner=Own())
        assert len(called) == number


@pytest.mark.usefixtures("folder")
def test_threads_that_start_the_same_wait_for_each_other() -> None:
    plans = list[Planned]()
    jits = [memplan.jit(STEP, budget=int(0.8 * NBYTES)) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda jitted=jitted: plans.append(jitted.plan(*ARGS)))
        for jitted in jits
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 3 and len({str(planned.plan) for planned in plans}) == 1


def test_without_jaxs_cache_every_start_plans(called: list[str]) -> None:
    for number in (1, 2):
        start(0.8)
        assert len(called) == number
