"""Commands about many devices."""

from __future__ import annotations

import json

import pytest

from memplan.hardware.topology import TOPOLOGIES
from tests.cli.command import message, run


@pytest.mark.parametrize(
    ("option", "words"),
    [("--spread=-0.1", "spread is -0.1"), ("--spread=nan", "spread is nan"), ("--spread=2", "0.02 for 2 %")],
)
def test_an_overhead_that_no_machine_has_is_refused(option: str, words: str) -> None:
    result = run("topology", "simulate", "tests.dense:make", "--on", "ddl", "--device", "p100", option)
    assert words in message(result, 2)


def test_topologies_are_listed() -> None:
    listed = json.loads(run("topology", "--json", "-").stdout)["topologies"]
    assert [one["name"] for one in listed] == list(TOPOLOGIES)
    assert [level["size"] for level in listed[0]["levels"]] == list(TOPOLOGIES["ddl"].sizes.values())
    assert all(name in run("topology").stdout for name in TOPOLOGIES)
    assert "--measure" in message(run("topology", "--out", "t.json"), 2)
