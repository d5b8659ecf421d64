"""Seconds of schedules, added up by hand, and the rank of solutions."""

from dataclasses import replace

import pytest

from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import Solution, rank, seconds
from tests.planning.small import actions, looping


def chain(*took_s: float) -> Problem:
    buffers = tuple(Buffer(f"{i}", 10, Role.TEMPORARY, i, i) for i in range(len(took_s)))
    kernels = tuple(
        Kernel(f"{i}", (i - 1,) if i else (), (i,), seconds=s) for i, s in enumerate(took_s)
    )
    return Problem(buffers, kernels, (len(took_s) - 1,), frozenset())


@pytest.mark.parametrize(
    ("text", "took_s"),
    [
        ("run 0, run 1, run 2", 6.0),
        ("run 0, run 1, run 0, run 1, run 2", 9.0),
        # waits for the copy, which takes five seconds
        ("run 0, offload 0, run 1, offloaded 0, run 2", 1 + 5 + 3),
        ("run 0, offload 0, run 1, run 2, offloaded 0", 6.0),
        # one at a time
        ("run 0, offload 0, run 1, offload 1, run 2, offloaded 0, offloaded 1", 1 + 5 + 5),
        ("run 0, offload 0, run 1, offloaded 0, prefetch 0, run 2, prefetched 0", 1 + 5 + 5),
        (
            "run 0, offload 0, offloaded 0, offload 0, prefetch 0, prefetched 0, offloaded 0",
            1 + 5 + 5,
        ),  # both ways
        ("run 0, offload 0", 6.0),  # the last copy counts
    ],
)
def test_copies_go_beside_kernels(text: str, took_s: float) -> None:
    assert seconds(chain(1, 2, 3), actions(text), lambda nbytes: nbytes / 2) == took_s


def test_what_stands_in_a_loop_runs_once_a_trip() -> None:
    problem = looping()
    kernels = tuple(replace(kernel, seconds=1.0) for kernel in problem.kernels)
    problem = replace(problem, kernels=kernels)
    assert problem.times == (1, 3, 3, 3, 3, 1, 1)
    assert seconds(problem, tuple(actions("run 0, run 1, run 2, run 2"))) == 1 + 3 + 3 + 3


def test_what_fits_then_what_is_fast_then_what_is_small() -> None:
    fast, slow = (Solution((), 8, took_s, 0, 1.0, fits=True) for took_s in (2.0, 3.0))
    small, large = (Solution((), nbytes, 1.0, 0, 1.0, fits=False) for nbytes in (9, 10))
    assert sorted([large, slow, small, fast], key=rank) == [fast, slow, small, large]
