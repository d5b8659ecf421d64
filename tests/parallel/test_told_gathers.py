"""Gathers that a user does not expect are told with the line; those of a layout are not.

The steps of `meshed_steps.py` are silent, too: their own tests fail on any warning."""

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
    """What `told_gathers.py` found."""
    return printed_by("tests.parallel.told_gathers")


def expected(name: str) -> str:
    """What is said of a loud step, with its line."""
    _, begins, said = LOUD[name]
    path = Path(gathering_steps.__file__)
    (line,) = (n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(begins))
    return said.format(f"{path.relative_to(ROOT)}:{line}")


def told(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        memplan.jit(case.step, device="a100", topology="2x4", **case.options).plan(*shaped(case))
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("name", LOUD)
def test_what_the_user_did_not_ask_for_is_told_once(name: str, on_eight: Any) -> None:
    (said,) = on_eight[name]
    assert said.startswith(BEGINS) and expected(name) in said and said.count("\n") == 1


@pytest.mark.parametrize("name", SILENT)
def test_what_the_layout_of_a_step_takes_is_not(name: str, on_eight: Any) -> None:
    assert on_eight[name] == []


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", LOUD)
def test_for_described_gpus_the_same_is_told(name: str) -> None:
    (said,) = told(LOUD[name][0](ABSTRACT))
    assert said.startswith(BEGINS) and expected(name) in said and said.count("\n") == 1


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", SILENT)
def test_for_described_gpus_the_same_is_not(name: str) -> None:
    assert told(SILENT[name](ABSTRACT)) == []
