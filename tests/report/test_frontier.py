"""Frontiers: what limits a size, tables, JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memplan.report.frontier import Frontier, Trial

MIB = 2**20


def trial(size: tuple[int, ...], device: int, floor: int = 1, host: int = 0, fits: bool = False) -> Trial:
    return Trial(size, fits, device * MIB, host * MIB, "greedy", floor * MIB, "dot at net.py:3", 2)


@pytest.fixture
def frontier() -> Frontier:
    tried = (
        trial((1, 8), 6, fits=True),
        trial((1, 16), 12, floor=9),
        trial((2, 8), 7, fits=True),
        trial((2, 12), 10),
        trial((3, 4), 8, fits=True),
        trial((3, 8), 8, host=5),
    )
    return Frontier(
        ("layers", "rows"), ((1, 8), (2, 8), (3, 4), (4, 4), (5, 64)), ((1, 16), (2, 12), (3, 8), (4, 8), ()), tried,
        9, "v100", 8 * MIB, 4 * MIB, (("jax", "0.11.2"),),
    )  # fmt: skip


def test_json_brings_every_trial_back(frontier: Frontier) -> None:
    assert Frontier.from_json(frontier.to_json()) == frontier
    document = json.loads(frontier.to_json())
    assert document["schema"] == "memplan.frontier/1" and document["refused"][-1] == []
    assert document["tried"][0]["size"] == [1, 8] and "compilations" not in document


def test_what_limits_each_size(frontier: Frontier) -> None:
    assert [frontier.limit(refused) for refused in frontier.refused] == [
        "floor 9.0 MiB, dot at net.py:3",
        "the next needs 10.0 MiB",
        "the next needs 5.0 MiB of the host",
        "as in the row above",
        "the range ends",
    ]


def test_a_need_within_the_budget_is_not_over_it(frontier: Frontier) -> None:
    whole = replace(frontier, budget_bytes=12 * MIB)
    assert whole.limit((1, 16)).endswith("of the host")


def test_text_has_the_sizes_and_what_was_tried(frontier: Frontier) -> None:
    text = str(frontier)
    assert "The largest that fits 8.0 MiB on v100" in text
    assert "Sizes tried: 9 traced, 6 compiled, in 12 programs" in text
    assert text.count("too large") == 3
    largest, _ = frontier.tables(0)
    assert largest.rows[3] == ("4", "4", "", "", "as in the row above")  # never compiled
