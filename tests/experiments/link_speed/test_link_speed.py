"""The table of links, by hand and as committed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.link_speed import run
from experiments.link_speed.run import CASES, LINKS, MIB, README, Row, known, table
from experiments.readme import inserted
from memplan.hardware.catalog import named
from memplan.units import parse_bytes


def test_links_are_from_the_slowest_to_the_fastest() -> None:
    speeds = [named(f"{run.DEVICE}@{link}").link.bandwidth for link in LINKS]
    assert speeds == sorted(speeds)


def test_every_link_is_told_against_the_plain_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    alone = Row("none", 4 * MIB, 0.1, 2 * MIB, 3, 0, 0.12, 0.0, 0.0)
    moved = Row("pcie3x16", 4 * MIB, 0.1, 2 * MIB, 0, 3 * MIB, 0.11, 0.04, 0.03)
    for row in (moved, alone):
        (tmp_path / f"{row.link}.json").write_text(json.dumps(asdict(row)))
    assert table().splitlines()[2:] == [
        "| none |  | 2 | 3 | 0 | 0 |  | 120.0 | +20.0% |",
        "| pcie3x16 | 12.6 | 2 | 0 | 3 | 40 | 75% | 110.0 | +10.0% |",
    ]


def test_readme_is_what_the_results_say() -> None:
    text = README.read_text()
    assert text == inserted(text, table())


def test_every_plan_is_within_the_budget_and_follows_its_link() -> None:
    rows = {row.link: row for row in known()}
    assert {"none", LINKS[0], LINKS[-1]} <= set(rows) <= set(CASES)
    assert all(row.device_bytes <= parse_bytes(run.BUDGET, 0) < row.plain_bytes for row in rows.values())
    none, slow, fast = (rows[link] for link in ("none", LINKS[0], LINKS[-1]))
    assert none.offloaded_bytes == 0 < slow.offloaded_bytes < fast.offloaded_bytes
    assert none.again > slow.again > fast.again
    assert fast.step_s < min(none.step_s, slow.step_s)
