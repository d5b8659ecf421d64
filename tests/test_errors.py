"""Errors: the last line of each names the section of the guides that explains its class."""

import re
from pathlib import Path

import pytest

from memplan import errors
from memplan.cli.factory import FactoryError
from memplan.errors import MemplanError
from memplan.verify.dataflow import NotThePlainModuleError

ROOT = Path(__file__).parents[1]
NAMES = [
    name
    for path in sorted((ROOT / "memplan").rglob("*.py"))
    for name in re.findall(r"^class (\w+)\(MemplanError\b", path.read_text(), re.MULTILINE)
]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)] + [
    FactoryError,
    NotThePlainModuleError,
]
TOLD_AS_OTHERS = {"UnreadableModuleError"}


class Mended(MemplanError, ValueError):
    guide = "errors#mended"


def test_all_errors_have_a_guide() -> None:
    assert {kind.__name__ for kind in KINDS if kind.guide} == set(NAMES) - TOLD_AS_OTHERS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.guide])
def test_the_guide_is_there(kind: type[MemplanError]) -> None:
    page, anchor = kind.guide.split("#")
    assert f"({anchor})=\n#" in (ROOT / "docs" / "guides" / f"{page}.md").read_text()


def test_the_guide_is_the_last_line() -> None:
    assert str(Mended("It broke. Mend it.")) == "It broke. Mend it.\nguide: errors#mended"
    assert Mended("It broke. Mend it.").message == "It broke. Mend it."
    assert str(MemplanError("It broke.")) == MemplanError("It broke.").message == "It broke."


def test_an_error_that_quotes_one_of_its_class_names_the_guide_once() -> None:
    inner = Mended("It broke.")
    assert str(Mended(f"a.json: {inner}")) == "a.json: It broke.\nguide: errors#mended"
