"""Whatever a document holds, its loader gives the object, which can be shown and saved, or an error of memplan's."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memplan import MemplanError
from tests.documents import ANYTHING, Form, damaged, forms

NAMES = [
    "Report",
    "Comparison",
    "Curve",
    "Frontier",
    "Diagnosis",
    "MeasuredDevice",
    "Topology",
    "Plan",
]
FORMS = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    return dict(forms(tmp_path_factory.mktemp("documents")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("document") / "document.json"


def test_all_kinds_are_here(known: dict[str, Form]) -> None:
    assert list(known) == NAMES


@FORMS
def test_a_valid_one_is_loaded(name: str, known: dict[str, Form], path: Path) -> None:
    assert loads(known[name], known[name].text.encode(), path)


def loads(form: Form, written: bytes, path: Path) -> bool:
    """Whether it is loaded; then it is used. Any error but memplan's own fails the test."""
    path.write_bytes(written)
    found, told = None, ""
    try:
        found = form.load(path)
    except MemplanError as error:
        told = str(error)
    assert len(told.encode()) < 1000
    if not told:
        form.use(found)
    return not told


@FORMS
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_one(name: str, data: st.DataObject, known: dict[str, Form], path: Path) -> None:
    loads(known[name], data.draw(damaged(known[name].text)), path)


@FORMS
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(written=ANYTHING)
@example(written=b"[" * 100_000)
def test_anything(name: str, written: bytes, known: dict[str, Form], path: Path) -> None:
    assert not loads(known[name], written, path)


@pytest.mark.slow
@FORMS
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_one_at_length(
    name: str, data: st.DataObject, known: dict[str, Form], path: Path
) -> None:
    loads(known[name], data.draw(damaged(known[name].text)), path)
