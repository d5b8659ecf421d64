"""Every operation can be timed, on the smallest sizes; how long anything takes is not tested."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from memplan.hardware import measured
from memplan.xla import microbench
from memplan.xla.microbench import Patience, Size, Task

TASKS = microbench.tasks()
ONCE = Patience(runs=1, enough_s=0.0, most_nbytes=0)


@dataclass
class Clock:
    """Goes on only where work is said to take time: a busy machine changes nothing."""

    now: float = 0.0

    def work(self, seconds: float, nbytes: int = 1) -> Size:
        return Size(f"{seconds} s", 6.0, nbytes, lambda: functools.partial(self.go_on, seconds))

    def go_on(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(microbench.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_names_that_a_specification_is_made_of_are_measured() -> None:
    names = [task.name for task in TASKS]
    assert len(set(names)) == len(names)
    wanted = {
        measured.ELEMENTWISE,
        measured.MEMORY,
        measured.TO_HOST,
        measured.TO_DEVICE,
        measured.BOTH_WAYS,
        measured.LATENCY,
    }
    assert wanted | {measured.MATRIX.format(dtype) for dtype in ("float32", "bfloat16", "float16")} <= set(names)
    assert any(name.startswith("convolution 3D") for name in names)


@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_sizes_grow(task: Task) -> None:
    works = [size.work for size in task.sizes]
    assert works == sorted(works) and works[0] > 0
    assert all(size.nbytes > 0 for size in task.sizes)


@pytest.mark.parametrize("task", [task for task in TASKS if task.sizes[0].nbytes < 2**26], ids=lambda task: task.name)
def test_every_operation_runs_at_its_smallest_size(task: Task) -> None:
    found = task.measure(ONCE)
    assert (found.name, found.unit, found.runs, len(found.timings)) == (task.name, task.unit, 1, 1)
    assert found.value > 0 and found.best.size == task.sizes[0].label


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_is_swept_again_and_again(in_place: bool) -> None:
    run = microbench._sweep(4096, in_place).make()
    first, second = float(run()[0]), float(run()[0])
    assert (first, second) == ((2.0, 3.0) if in_place else (2.0, 2.0))


@pytest.mark.parametrize("ways", ["out", "in", "out in"])
def test_copies_between_two_kinds_of_memory(ways: str) -> None:
    """As on a GPU: the CPU's backend knows pinned host memory too."""
    moved: Any = microbench._link_copies(jax.devices()[0])(4096, ways)()
    kinds = {"out": "pinned_host", "in": "device"}
    assert [array.sharding.memory_kind for array in moved] == [kinds[way] for way in ways.split()]


@pytest.mark.parametrize("ways", ["out", "out in"])
def test_memory_copies_move_their_bytes_once_for_each_way(ways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(np, "copyto", lambda to, _: moved.append(to.nbytes))
    microbench._memory_copies(4096, ways)()
    assert moved == [4096] * len(ways.split())


def test_what_ends_too_soon_counts_only_alone(clock: Clock) -> None:
    sizes = [clock.work(0.001), clock.work(0.02)]
    assert [timing.size for timing in Task("nap", "FLOP/s", sizes).measure(Patience(runs=2)).timings] == ["0.02 s"]
    assert [timing.size for timing in Task("nap", "FLOP/s", sizes[:1]).measure(Patience(runs=2)).timings] == ["0.001 s"]


def test_no_size_after_one_that_took_long_enough_or_would_not_fit(clock: Clock) -> None:
    long = Task("nap", "FLOP/s", [clock.work(0.01), clock.work(100.0)])
    assert len(long.measure(Patience(runs=1, enough_s=0.005)).timings) == 1
    large = Task("nap", "FLOP/s", [clock.work(0.01), clock.work(100.0, nbytes=2)])
    assert len(large.measure(Patience(runs=1, most_nbytes=1)).timings) == 1
