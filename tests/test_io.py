"""A file is there whole, or as it was; what is read is what was written, and what is wrong with it has its place."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from memplan import io


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    rows: tuple[Inner, ...] = ()
    pair: tuple[str, int] = ("red", 1)
    rates: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    colour: Colour = Colour.RED
    pairs: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("it has no name")


@dataclass(frozen=True)
class Circle:
    tag: ClassVar = "circle"
    radius: int


@dataclass(frozen=True)
class Square:
    tag: ClassVar = "square"
    side: int


@dataclass(frozen=True)
class Drawing:
    shapes: tuple[Circle | Square, ...]
    frame: Square | None = None


PAIRS = frozenset({(3, 1), (2, 5)})
OUTER = Outer(
    "x", (Inner(1), Inner(2, 0.5)), ("red", 3), {"f": 1.0}, "b", Inner(4), Colour.BLUE, PAIRS
)


def test_a_dataclass_comes_back() -> None:
    assert (
        io.decode(Outer, json.loads(json.dumps(io.encode(OUTER))), complete=True, exact=True)
        == OUTER
    )
    assert io.decode(Outer, {"name": "x", "later": 1}) == Outer("x")
    assert io.encode(OUTER)["pairs"] == [[2, 5], [3, 1]]
    assert io.encode(Inner(np.int64(3), np.float64(0.5))) == {"number": 3, "share": 0.5}


def test_members_of_a_union_are_told_apart_by_their_tags() -> None:
    drawing = Drawing((Circle(1), Square(2)), Square(3))
    document = io.encode(drawing)
    assert document["shapes"] == [{"tag": "circle", "radius": 1}, {"tag": "square", "side": 2}]
    assert io.decode(Drawing, document, complete=True, exact=True) == drawing
    shape = r"'shapes\[0\]\.tag' is .*, not one of circle, square"
    for entries, error in (
        ({"tag": "oval"}, shape),
        ({"tag": ["circle"]}, shape),
        ({}, shape),
        ({"tag": "circle"}, r"no entry 'shapes\[0\]\.radius'"),
        ({"tag": "circle", "radius": 1, "side": 1}, r"unknown entry 'shapes\[0\]\.side'"),
        (3, r"'shapes\[0\]' is 3, not an object"),
    ):
        with pytest.raises(ValueError, match=error):
            io.decode(Drawing, {"shapes": [entries]}, exact=True)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"name": 5}, "its 'name' is 5, not text"),
        ({"name": ""}, "it has no name"),
        ({"rows": {}}, "its 'rows' is {}, not a list"),
        ({"rows": [3]}, r"its 'rows\[0\]' is 3, not an object"),
        ({"rows": [{"number": 1}, {}]}, r"it has no entry 'rows\[1\]\.number'"),
        ({"rows": [{"number": True}]}, r"'rows\[0\]\.number' is True, not a whole number"),
        ({"rows": [{"number": 1.0}]}, r"'rows\[0\]\.number' is 1\.0, not a whole number"),
        ({"rows": [{"number": 1, "share": {}}]}, r"'rows\[0\]\.share' is {}, not a number"),
        ({"inner": {"number": 1, "share": math.nan}}, r"'inner\.share' is nan, not a number"),
        ({"inner": {"number": 1, "share": 10**400}}, r"'inner\.share' is 1000"),
        ({"pair": ["red"]}, r"'pair' is \['red'\], not a list of 2"),
        ({"pair": ["red", "1"]}, r"'pair\[1\]' is '1', not a whole number"),
        ({"rates": {"f": 1.0, "g": "fast"}}, r"'rates\.g' is 'fast', not a number"),
        ({"colour": "green"}, "'colour' is 'green', not one of red, blue"),
        ({"pairs": [[1, 2], [3]]}, r"'pairs\[1\]' is \[3\], not a list of 2"),
        ({"pairs": 3}, "'pairs' is 3, not a list"),
        ({"kind": ["a"]}, r"'kind' is \['a'\], not one of a, b"),
    ],
)
def test_what_is_wrong_is_named(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        io.decode(Outer, {**io.encode(OUTER), **entries})


def test_entries_may_be_required_and_refused() -> None:
    with pytest.raises(ValueError, match=r"no entry 'rows\[0\]\.share'"):
        io.decode(Outer, {**io.encode(OUTER), "rows": [{"number": 1}]}, complete=True)
    with pytest.raises(ValueError, match="unknown entry 'later'"):
        io.decode(Outer, {**io.encode(OUTER), "later": 1}, exact=True)
    with pytest.raises(ValueError, match=r"rows\[0\]\.share is inf"):
        io.encode(Outer("x", (Inner(1, math.inf),)))


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    io.write_atomic(path, "before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            io.write_atomic(path, "after")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        io.write_atomic(tmp_path / "nowhere" / "file", "after")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "two entries 'b'"),
        (r'{"a": "\ud800"}', "surrogates not allowed"),
        ("9" * 5000, "4300"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_document_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        io.parse(text)
    assert io.parse(r'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", "\\ud800"]


def test_large_documents_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "document.json"
    path.write_text('{"format": 1}')
    assert io.read_json(path, 1) == {}
    monkeypatch.setattr(io, "_MAX_ENTRIES", 3)
    assert io.parse("[1, 2, 3]") == [1, 2, 3]
    with pytest.raises(ValueError, match="more entries"):
        io.parse("[1, 2, 3, 4]")
    monkeypatch.setattr(io, "MOST_BYTES", 12)
    with pytest.raises(ValueError, match="more than 0 MiB"):
        io.read_json(path, 1)


@dataclass(frozen=True)
class Sizes:
    whole: int
    real: float = 0.0


def test_whole_numbers_have_64_bits() -> None:
    assert io.decode(Sizes, {"whole": 2**63 - 1, "real": 10**20}) == Sizes(2**63 - 1, 1e20)
    with pytest.raises(ValueError, match="'whole' is a number of more than 64 bits"):
        io.decode(Sizes, {"whole": -(2**63)})
