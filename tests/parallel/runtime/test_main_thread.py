"""What the main thread waits for, looked at from another thread while it waits at places of all sorts."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.parallel.runtime import main_thread
from memplan.parallel.runtime.main_thread import MainThreadObserver

LEFT = (1,)


class Waiting:
    """As a jitted function that waits in C++: no frame of Python's shows it."""

    lower = trace = None
    __call__ = staticmethod(select.select)


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays with a dimension count as those of processes that have left."""
    monkeypatch.setattr(main_thread, "IDLE_S", 0.2)
    monkeypatch.setattr(main_thread, "_is_spread", lambda array, left: array.ndim > 0)


def seen_at(stand: Callable[[], Any]) -> tuple[bool | None, float, str]:
    """What a second thread finds while the main thread stands there for 0.6 s."""
    found: list[tuple[bool | None, float, str]] = []

    def look() -> None:
        one, still_s = MainThreadObserver(), 0.0
        for _ in range(10):
            time.sleep(0.05)
            still_s = one.sample(time.monotonic())
        found.append((one.waits_for(LEFT), still_s, one.where()))

    thread = threading.Thread(target=look)
    thread.start()
    stand()
    thread.join()
    return found[0]


def test_a_jitted_function_of_arrays_of_the_others_waits_for_them() -> None:
    step, state, own = Waiting(), {"w": jnp.ones(2)}, jnp.ones(())
    holder, steps = SimpleNamespace(step=step), [step]
    assert seen_at(lambda: step([], [], [state][1:], 0.6))[0] is True
    assert seen_at(lambda: holder.step([], [], [state][1:], 0.6))[0] is True
    assert seen_at(lambda: step([], [], [own][1:], 0.6))[0] is False
    assert seen_at(lambda: step([], [], [], 0.6))[0] is None
    assert seen_at(lambda: steps[0]([], [], [state][1:], 0.6))[0] is None


def test_sleeping_and_other_waits_are_not_for_the_others() -> None:
    event = threading.Event()

    def often() -> None:
        for seconds in (*[0.0] * 50, 0.6):  # Python calls functions another way once they are called often
            time.sleep(seconds)

    for stand in (lambda: time.sleep(0.6), lambda: event.wait(0.6), often):
        waits, still_s, _ = seen_at(stand)
        assert waits is False and still_s > 0.3
    assert "test_main_thread.py" in seen_at(lambda: time.sleep(0.6))[2]


def test_what_computes_does_not_wait() -> None:
    state = jnp.ones(())
    turn = jax.jit(lambda x: jax.lax.fori_loop(0, 2_000_000, lambda _, x: jnp.tanh(x), x))

    def compute() -> None:
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            turn(state).block_until_ready()

    compute()
    assert seen_at(compute)[0] is False


def test_another_place_is_no_standing_still() -> None:
    one = MainThreadObserver()
    assert one.sample(1.0) == 0.0 and one.where()
    assert one.waits_for(LEFT) in (False, None)
