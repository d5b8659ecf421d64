"""Scripts of the gallery: each is on its page, and one line is memplan's. The page is built only if they run alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import gallery

PAGE = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()


def test_all_scripts_are_on_the_page() -> None:
    assert len(gallery.NAMES) == 12
    assert sorted(re.findall(r'shown\("(\w+)"\)', PAGE)) == gallery.NAMES
    assert sorted(re.findall(r"literalinclude\} examples/(\w+)\.py", PAGE)) == gallery.NAMES


@pytest.mark.parametrize("name", gallery.NAMES)
def test_one_line_is_memplans(name: str) -> None:
    plain, changed = gallery.without(gallery.source_of(name))
    assert changed == 1 and len(plain.splitlines()) < 80
    assert "memplan" not in plain.split('"""', 2)[2]  # behind the docstring
