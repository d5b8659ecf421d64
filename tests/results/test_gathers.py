"""The warning about gathers names the largest."""

from dataclasses import replace

from memplan.results.gathers import gather_warning
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.shapes import Array
from tests.compilation.outcomes import PROGRAM, outcome

STEP = outcome(PROGRAM, 40_000)


def gather(nbytes: int, line: int = 1) -> Gather:
    return Gather("sort", f"step.py:{line}", Array("f32", (nbytes // 4,)), nbytes, nbytes // 4)


def test_a_gather_below_a_hundredth_of_the_step_causes_no_warning() -> None:
    assert gather_warning(STEP) == gather_warning(replace(STEP, gathers=(gather(396),))) == ""
    message = gather_warning(replace(STEP, gathers=(gather(400),)))
    assert "a sort (step.py:1): each device gathers float32[100], 400 B, of which its own piece is 100 B." in message


def test_the_three_largest_are_named_and_the_others_counted() -> None:
    message = gather_warning(replace(STEP, gathers=tuple(gather(4000, line) for line in range(1, 6))))
    assert [f"step.py:{line}" in message for line in range(1, 6)] == [True] * 3 + [False] * 2
    assert message.endswith("\n  and 2 more")
