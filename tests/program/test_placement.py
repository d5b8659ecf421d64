"""Steps over several devices: their plans hold one device's share, and their results lie where the step's own do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own: how many devices the CPU pretends to be is settled when jax starts."""
    script = Path(__file__).with_name("several_devices.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "way", ["by arguments", "by one argument", "by in_shardings", "by a constraint", "by shard_map"]
)
def test_a_step_over_several_devices(found: dict[str, Any], way: str) -> None:
    one = found[way]
    assert one["planner"] in ("greedy", "milp")
    assert one["baseline"]  # bytes of one device
    assert one["within"] <= 1
    assert 0.9 <= one["predicted"] <= 1.1
    assert one["same"]
    assert one["placed"]
