"""Gathers that a user does not expect cause a warning with the line; those of a layout do not.

The steps of `meshed_steps.py` cause no warnings, either: their own tests fail on any.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

import memplan
from tests.parallel import gathering_steps
from tests.parallel.gathering_steps import LOUD, SILENT
from tests.parallel.meshed_steps import ABSTRACT, Case, shaped
from tests.parallel.printed import ROOT, printed_by

BEGINS = "XLA cannot divide these operations of the step along the dimension that is divided among the devices"


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """Results of `warned_gathers.py`."""
    return printed_by("tests.parallel.warned_gathers")


def expected(name: str) -> str:
    """The warning about a loud step, with its line."""
    _, start, message = LOUD[name]
    path = Path(gathering_steps.__file__)
    (line,) = (n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(start))
    return message.format(f"{path.relative_to(ROOT)}:{line}")


def warnings_of(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memplan.jit(case.step, device="a100", topology="2x4", **case.options).plan(*shaped(case))
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", LOUD)
def test_a_gather_that_the_user_did_not_request_causes_one_warning(name: str, on_eight: Any) -> None:
    (message,) = on_eight[name]
    assert message.startswith(BEGINS) and expected(name) in message and message.count("\n") == 1


@pytest.mark.parametrize("name", SILENT)
def test_gathers_of_the_layout_cause_none(name: str, on_eight: Any) -> None:
    assert on_eight[name] == []


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", LOUD)
def test_a_gather_for_described_gpus_causes_the_same_warning(name: str) -> None:
    (message,) = warnings_of(LOUD[name][0](ABSTRACT))
    assert message.startswith(BEGINS) and expected(name) in message and message.count("\n") == 1


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", SILENT)
def test_gathers_of_the_layout_for_described_gpus_cause_none(name: str) -> None:
    assert warnings_of(SILENT[name](ABSTRACT)) == []
