"""Frontiers: limits, tables, JSON."""

import json
from dataclasses import replace

import pytest

from memplan.report.frontier import Frontier, Trial

MIB = 2**20
REFUSED = Trial(16, False, 12 * MIB, 0, "kernels", 9 * MIB, "dot at net.py:3", 0, 2)


@pytest.fixture
def frontier() -> Frontier:
    fits = Trial(8, True, 6 * MIB, 0, "kernels", MIB, "dot at net.py:3", 2, 0, 0.5, 0.125)
    return Frontier("rows", 8, 16, (fits, REFUSED), "v100", 8 * MIB, 4 * MIB, (("jax", "0.11.2"),))


def test_json_brings_every_trial_back(frontier: Frontier) -> None:
    document = json.loads(frontier.to_json())
    assert document["schema"] == "memplan.frontier/2" and document["refused"] == 16
    assert document["tried"][0]["size"] == 8
    assert not {"compilations", "explorations"} & set(document)


@pytest.mark.parametrize(
    ("refused", "limit"),
    [
        (REFUSED, "floor 9.0 MiB, dot at net.py:3"),
        (replace(REFUSED, floor_bytes=MIB), "the next needs 12.0 MiB"),
        (
            replace(REFUSED, floor_bytes=MIB, device_bytes=8 * MIB, host_bytes=5 * MIB),
            "needs 5.0 MiB of the host",
        ),
    ],
)
def test_the_limit_of_a_size(frontier: Frontier, refused: Trial, limit: str) -> None:
    assert limit in replace(frontier, tried=(frontier.tried[0], refused)).limit
    assert replace(frontier, refused=None).limit == "the range ends"


def test_text_has_the_size_and_all_trials(frontier: Frontier) -> None:
    text = str(frontier)
    assert "The largest that fits 8.0 MiB on v100" in text and "floor 9.0 MiB" in text
    assert "Sizes tried: 2, in 4 programs" in text and text.count("too large, predicted") == 1
    assert text.count("fits, compiled") == 1
    assert text.count("500 ms") == 2 and text.count("125 ms") == 1
