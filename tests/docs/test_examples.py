"""Every script of the gallery, run whole: one line is memplan's, its budget is kept, and no loss loses a bit."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", gallery.NAMES)
def test_a_script_trains_as_without_a_budget(name: str) -> None:
    planned, plain = gallery.run(name), gallery.run(name, plain=True)
    report = planned.report
    assert report is not None and plain.report is None and report.planner != "none"
    assert report.compiled_peak_bytes <= report.budget_bytes < 0.82 * report.baseline_peak_bytes
    assert planned.losses == plain.losses  # to the last bit
    assert planned.losses[-1] < planned.losses[0]
    assert "+import memplan" in gallery.shown(name) and "Compiled plans" in gallery.shown(name)
