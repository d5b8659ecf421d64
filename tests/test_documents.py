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
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    return dict(forms(tmp_path_factory.mktemp("documents")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("document") / "document.json"


def test_all_kinds_are_here(kinds: dict[str, Form]) -> None:
    assert list(kinds) == NAMES


@FORMS
def test_a_valid_one_is_loaded(name: str, kinds: dict[str, Form], path: Path) -> None:
    assert loads(kinds[name], kinds[name].text.encode(), path)


def loads(form: Form, written: bytes, path: Path) -> bool:
    """Whether it is loaded; then it is used. Any error but memplan's own fails the test."""
    path.write_bytes(written)
    loaded, message = None, ""
    try:
        loaded = form.load(path)
    except MemplanError as error:
        message = str(error)
    assert len(message.encode()) < 1000
    if not message:
        form.use(loaded)
    return not message


@FORMS
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_one(name: str, data: st.DataObject, kinds: dict[str, Form], path: Path) -> None:
    loads(kinds[name], data.draw(damaged(kinds[name].text)), path)


@FORMS
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(written=ANYTHING)
@example(written=b"[" * 100_000)
def test_anything(name: str, written: bytes, kinds: dict[str, Form], path: Path) -> None:
    assert not loads(kinds[name], written, path)


@pytest.mark.slow
@FORMS
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_one_at_length(
    name: str, data: st.DataObject, kinds: dict[str, Form], path: Path
) -> None:
    loads(kinds[name], data.draw(damaged(kinds[name].text)), path)
