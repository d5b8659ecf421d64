"""Beats, and how long each allows until the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime.cluster import LAUNCHED, Cluster
from memplan.parallel.runtime.heartbeats import Heartbeat
from memplan.parallel.runtime.watchdog import STARTING, Watchdog


@pytest.fixture
def monitor() -> Any:
    return SimpleNamespace(heartbeat=Heartbeat())


def cluster(monitor: Any) -> Cluster:
    return Cluster(0, 2, 1, 2, "h:1", LAUNCHED, {}, monitor)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_watchdog_needs_some_time(monitor: Any, timeout_s: float) -> None:
    with pytest.raises(MemplanError, match="would bite at once"):
        Watchdog(cluster(monitor), timeout_s)


def test_the_first_beats_may_take_longer(monitor: Any) -> None:
    watchdog = Watchdog(cluster(monitor), 5.0, start_s=60.0)
    limits = []
    for step in range(STARTING + 2):
        watchdog.beat(step)
        limits.append(monitor.heartbeat.limit_s)
    assert limits == [60.0] * STARTING + [5.0, 5.0]


def test_no_beat_has_less_time_than_the_later_ones(monitor: Any) -> None:
    Watchdog(cluster(monitor), 90.0, start_s=60.0).beat(0)
    assert monitor.heartbeat.limit_s == 90.0


def test_a_step_beats_before_and_behind(monitor: Any) -> None:
    with Watchdog(cluster(monitor), 5.0).step(7):
        assert (monitor.heartbeat.count, monitor.heartbeat.step) == (1, 7)
    assert (monitor.heartbeat.count, monitor.heartbeat.step) == (2, 7)


def test_a_step_that_fails_does_not_beat_behind(monitor: Any) -> None:
    with pytest.raises(ZeroDivisionError), Watchdog(cluster(monitor), 5.0).step(7):
        raise ZeroDivisionError
    assert monitor.heartbeat.count == 1


def test_behind_its_end_nobody_is_late(monitor: Any) -> None:
    watchdog = Watchdog(cluster(monitor), 5.0)
    watchdog.beat(3)
    watchdog.stop()
    assert monitor.heartbeat.limit_s is None and monitor.heartbeat.step == 3
