"""Legal schedules, and one for each fault."""

import pytest

from memplan.planning.legal import fault
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import runs
from tests.planning.small import actions, fetching, looping, updating

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


AWAY, BACK = "offload {0}, offloaded {0}", "prefetch {0}, prefetched {0}"


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"run 0, run 1, run 2, {AWAY.format(2)}, {BACK.format(2)}, run 3, run 4, run 5, run 6",
            None,
        ),
        (
            f"run 0, run 1, run 2, {AWAY.format(2)}, run 3, run 4, run 5, {BACK.format(2)}, run 6",
            "outside",
        ),
        (
            f"run 0, run 1, {AWAY.format(0)}, {BACK.format(0)}, run 2, run 3, run 4, run 5, run 6",
            "outside",
        ),
    ],
)
def test_a_copy_is_in_the_body_that_makes_what_it_copies(text: str, expected: str | None) -> None:
    message = fault(looping(), actions(text))
    assert message is None if expected is None else expected in (message or "")


def test_once_in_their_order() -> None:
    buffers = tuple(Buffer(f"{i}", 8, Role.OUTPUT, i, i) for i in range(2))
    kernels = tuple(Kernel(f"effect{i}", (), (i,), recomputable=False) for i in range(2))
    acting = Problem(buffers, kernels, (0, 1), frozenset())
    assert fault(acting, runs([0, 1])) is None
    assert "order" in (fault(acting, runs([1, 0])) or "")


def test_what_a_pair_writes_is_copied_behind_its_end() -> None:
    away = "offloaded 0, prefetch 0, prefetched 0, run 3"
    assert fault(fetching(), actions(f"run 0, run 1, run 2, offload 0, {away}")) is None
    early = fault(fetching(), actions(f"run 0, offload 0, run 1, run 2, {away}"))
    assert early == "offload of fetched is out of turn"
