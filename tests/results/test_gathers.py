"""Gathers that a user does not expect cause a warning with the line; those of a layout do not.

The steps of `meshed_steps.py` cause no warnings, either: their own tests fail on any.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.results.gathers import gather_warning
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.shapes import Array
from tests.compilation.outcomes import PROGRAM, outcome
from tests.parallel.meshed_steps import ABSTRACT
from tests.parallel.printed import ROOT, printed_by
from tests.results import gathering_steps
from tests.results.gathering_steps import LOUD, SILENT, warnings_of

STEP = outcome(PROGRAM, 40_000)
BEGINS = "XLA cannot divide these operations of the step along the dimension that is divided among the devices"
DESCRIBED = {"device": "a100", "topology": "2x4"}


def by_default(steps: Mapping[str, Any], *names: str) -> list[Any]:
    """All steps; those of other names, which CPU devices run by default, are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in names else slow) for name in steps]


def gather(nbytes: int, line: int = 1) -> Gather:
    return Gather("sort", f"step.py:{line}", Array("f32", (nbytes // 4,)), nbytes, nbytes // 4)


def test_a_gather_below_a_hundredth_of_the_step_causes_no_warning() -> None:
    assert gather_warning(STEP) == gather_warning(replace(STEP, gathers=(gather(396),))) == ""
    message = gather_warning(replace(STEP, gathers=(gather(400),)))
    assert (
        "a sort (step.py:1): each device gathers float32[100], 400 B, of which its own piece is 100 B."
        in message
    )


def test_the_three_largest_are_named_and_the_others_counted() -> None:
    message = gather_warning(
        replace(STEP, gathers=tuple(gather(4000, line) for line in range(1, 6)))
    )
    assert [f"step.py:{line}" in message for line in range(1, 6)] == [True] * 3 + [False] * 2
    assert message.endswith("\n  and 2 more")


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """The warnings on eight CPU devices."""
    return printed_by("tests.results.gathering_steps")


def check_warning(name: str, message: str) -> None:
    """It is the warning about a loud step, with its line."""
    _, start, expected = LOUD[name]
    path = Path(gathering_steps.__file__)
    lines = enumerate(path.read_text().splitlines(), 1)
    (line,) = (number for number, text in lines if text.startswith(start))
    assert message.startswith(BEGINS) and message.count("\n") == 1
    assert expected.format(f"{path.relative_to(ROOT)}:{line}") in message


@pytest.mark.parametrize("name", LOUD)
def test_a_gather_that_the_user_did_not_request_causes_one_warning(
    name: str, on_eight: Any
) -> None:
    (message,) = on_eight[name]
    check_warning(name, message)


@pytest.mark.parametrize("name", SILENT)
def test_gathers_of_the_layout_cause_none(name: str, on_eight: Any) -> None:
    assert on_eight[name] == []


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", by_default(LOUD, "in_groups", "microbatches"))
def test_a_gather_for_described_gpus_causes_the_same_warning(name: str) -> None:
    (message,) = warnings_of(LOUD[name][0](ABSTRACT), **DESCRIBED)
    check_warning(name, message)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", by_default(SILENT, "in_groups_mapped", "asked_by_hand"))
def test_gathers_of_the_layout_for_described_gpus_cause_none(name: str) -> None:
    assert warnings_of(SILENT[name](ABSTRACT), **DESCRIBED) == []
