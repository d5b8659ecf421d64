"""Schedules that are right, and each way in which one is wrong."""

from __future__ import annotations

import pytest

from memplan.planning.legal import fault
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule, runs


def actions(text: str) -> Schedule:
    """`run 0, offload 0` as actions."""
    return tuple(Action(Kind(word.split()[0]), int(word.split()[1])) for word in text.split(", "))


def updating() -> Problem:
    """A weight, what is computed from it, what from that, and the weight's update in place."""
    buffers = (
        Buffer("weight", 8, Role.ARGUMENT, None, 0),
        Buffer("first", 8, Role.TEMPORARY, 0, 1),
        Buffer("second", 8, Role.TEMPORARY, 1, 2),
        Buffer("updated", 8, Role.OUTPUT, 2, 0),
        Buffer("loss", 8, Role.OUTPUT, 3, 4),
    )
    kernels = (
        Kernel("first", (0,), (1,)),
        Kernel("second", (1,), (2,)),
        Kernel("updated", (0, 2), (3,)),
        Kernel("loss", (1, 2), (4,)),
    )
    return Problem(
        buffers,
        kernels,
        (
            3,
            4,
        ),
        frozenset({0}),
    )


def looping() -> Problem:
    """A value, a loop with two kernels, and a reader of the value and of the loop's result."""
    buffers = (
        Buffer("before", 8, Role.TEMPORARY, 0, 0),
        Buffer("state", 8, Role.TEMPORARY, 1, 1),
        Buffer("inner", 8, Role.TEMPORARY, 2, 2),
        Buffer("next", 8, Role.TEMPORARY, 3, 1),
        Buffer("result", 8, Role.TEMPORARY, 5, 1),
        Buffer("after", 8, Role.OUTPUT, 6, 5),
    )
    kernels = (
        Kernel("before", (), (0,)),
        Kernel("body:begin", (), (1,), within=5, recomputable=False),
        Kernel("inner", (1,), (2,), within=5),
        Kernel("next", (1, 2), (3,), within=5),
        Kernel("body:end", (3,), (), within=5, recomputable=False),
        Kernel("loop", (0,), (4,), recomputable=False, trips=3),
        Kernel("after", (0, 4), (5,)),
    )
    return Problem(buffers, kernels, (5,), frozenset())


def fetching() -> Problem:
    """A value that comes by an asynchronous pair, a kernel beside it, and a reader of both."""
    buffers = (
        Buffer("fetched", 8, Role.TEMPORARY, 0, 0),
        Buffer("beside", 8, Role.TEMPORARY, 1, 1),
        Buffer("loss", 8, Role.OUTPUT, 3, 2),
    )
    kernels = (
        Kernel("copy-start", (), (0,), recomputable=False),
        Kernel("beside", (), (1,)),
        Kernel("copy-done", (0,), (), recomputable=False),
        Kernel("loss", (0, 1), (2,)),
    )
    return Problem(buffers, kernels, (2,), frozenset())


RIGHT = (
    "run 0, run 1, run 2, run 3",
    "run 0, run 1, run 0, run 2, run 3",
    "run 0, offload 1, run 1, offloaded 1, prefetch 1, run 2, prefetched 1, run 3",
    "run 0, offload 1, run 1, offloaded 1, prefetch 1, prefetched 1, run 2, prefetch 1, prefetched 1, run 3",
    "run 0, run 1, run 3, run 2",
)
WRONG = {
    "run 1, run 0, run 2, run 3": "second reads first",
    "run 0, run 1, run 2, run 0, run 3": "first reads weight",
    "run 0, run 1, run 2, run 3, run 3": "loss runs 2 times",
    "run 0, run 1, run 2": "loss is not there at the end",
    "run 0, run 1, run 3": "updated is not there",
    "run 0, offload 1, run 1, run 2, run 3": "never ends",
    "run 0, prefetch 1, prefetched 1, run 1, run 2, run 3": "prefetch of first is out of turn",
    "run 0, offload 1, prefetch 1, offloaded 1, prefetched 1, run 1, run 2, run 3": "prefetch of first",
    "offload 1, run 0, offloaded 1, run 1, run 2, run 3": "offload of first is out of turn",
    "run 0, offload 0, offloaded 0, run 1, run 2, run 3": "offload of weight is out of turn",
    "run 0, offloaded 1, run 1, run 2, run 3": "offloaded of first is out of turn",
}


@pytest.mark.parametrize("text", RIGHT)
def test_right(text: str) -> None:
    assert fault(updating(), actions(text)) is None


@pytest.mark.parametrize("text", WRONG)
def test_wrong(text: str) -> None:
    assert WRONG[text] in (fault(updating(), actions(text)) or "")


@pytest.mark.parametrize("order", [range(7), (0, 1, 2, 3, 4, 5, 0, 6), (0, 1, 2, 2, 3, 4, 5, 6)])
def test_loops_are_whole(order: list[int]) -> None:
    assert fault(looping(), runs(order)) is None


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((0, 1, 2, 0, 3, 4, 5, 6), "right before it"),
        ((0, 1, 2, 3, 4, 0, 5, 6), "right before it"),
        ((0, 2, 1, 3, 4, 5, 6), "left its computation"),
        ((0, 1, 2, 3, 5, 4, 6), "in its order"),
        ((0, 1, 2, 3, 2, 4, 5, 6), "inner reads state"),
        ((0, 1, 3, 2, 4, 5, 6), "reads inner"),
    ],
)
def test_what_breaks_a_loop(order: tuple[int, ...], said: str) -> None:
    assert said in (fault(looping(), runs(order)) or "")


def test_once_in_their_order() -> None:
    buffers = tuple(Buffer(f"{i}", 8, Role.OUTPUT, i, i) for i in range(2))
    kernels = tuple(Kernel(f"effect{i}", (), (i,), recomputable=False) for i in range(2))
    acting = Problem(
        buffers,
        kernels,
        (
            0,
            1,
        ),
        frozenset(),
    )
    assert fault(acting, runs([0, 1])) is None
    assert "order" in (fault(acting, runs([1, 0])) or "")


def test_what_a_pair_writes_is_copied_behind_its_end() -> None:
    away = "offloaded 0, prefetch 0, prefetched 0, run 3"
    assert fault(fetching(), actions(f"run 0, run 1, run 2, offload 0, {away}")) is None
    early = fault(fetching(), actions(f"run 0, offload 0, run 1, run 2, {away}"))
    assert early == "offload of fetched is out of turn"
