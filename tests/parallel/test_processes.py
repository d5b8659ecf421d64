"""Every step of real processes with gloo between them, against the same step on one device: also where 3, 5, 6 or 7
take part, whose reduce-scatter gloo gets wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from experiments.parallel.steady import CASES

pytestmark = pytest.mark.slow


def steady(processes: int, devices: int, mesh: str, steps: int, cases: Sequence[str] = tuple(CASES)) -> list[Any]:
    launch = [sys.executable, "-c", "from memplan.cli import main; main()", "launch", "-n", str(processes)]
    worker = ["--devices", str(devices), "--", sys.executable, "-m", "experiments.parallel.steady"]
    words = ["--mesh", mesh, "--steps", str(steps), "--cases", *cases]
    done = subprocess.run([*launch, *worker, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    ("processes", "devices", "mesh"), [(3, 4, "3x4"), (4, 2, "2x2x2"), (5, 1, "5x1"), (6, 1, "6"), (7, 1, "7x1")]
)
def test_every_step_is_that_of_one_device(processes: int, devices: int, mesh: str) -> None:
    found = steady(processes, devices, mesh, steps=10)
    assert len(found) == processes * len(CASES)
    assert [one for one in found if one["wrong"]] == []
