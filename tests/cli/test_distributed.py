"""Commands about many devices."""

from __future__ import annotations

import json

from memplan.hardware.topology import TOPOLOGIES
from tests.cli.command import message, run


def test_topologies_are_listed() -> None:
    listed = json.loads(run("topology", "--json", "-").stdout)["topologies"]
    assert [one["name"] for one in listed] == list(TOPOLOGIES)
    assert [level["size"] for level in listed[0]["levels"]] == list(TOPOLOGIES["ddl"].sizes.values())
    assert all(name in run("topology").stdout for name in TOPOLOGIES)
    assert "--measure" in message(run("topology", "--out", "t.json"), 2)
