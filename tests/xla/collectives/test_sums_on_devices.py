"""Numbers of steps whose sums go in phases over eight CPU devices, against what XLA compiles by itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NARROW = {"bfloat16": 1e-2, "float16": 2e-3}


def printed(module: str, *arguments: object) -> Any:
    command = [sys.executable, "-m", f"tests.xla.collectives.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(cases: dict[str, Any]) -> None:
    """Whole numbers are the same to the bit."""
    for name, case in cases.items():
        last = name.split()[-1]
        allowed = 0.0 if " over " in name else NARROW.get(last, 1e-6)
        assert case["off"] <= allowed, name
        # which XLA:CPU's layouts keep there
        assert not case["in loops"] or last == "accumulate", name


def test_two_hosts() -> None:
    cases = printed("sums_on_devices", "2x4")
    check(cases)
    # Sums of one and of three numbers stay: with zeros behind them they would be eight.
    assert cases["2x4 over a b"]["counts"] == {"all-reduce": 4, "all-to-all": 1, "all-gather": 1}
    # within hosts
    assert cases["2x4 over b"]["counts"] == {"all-reduce": 7, "all-to-all": 0, "all-gather": 0}
    assert (
        cases["2x4 bfloat16"]["counts"]["all-to-all"]
        > cases["2x4 over a b"]["counts"]["all-to-all"]
    )


@pytest.mark.slow
def test_four_hosts_and_three_levels() -> None:
    check(printed("sums_on_devices", "4x2", "2x2x2"))


@pytest.mark.slow
def test_random_programs() -> None:
    """A thousand take half an hour of one core: `python -m tests.xla.collectives.random_on_devices 0 1000`."""
    outcome = printed("random_on_devices", 0, 30)
    assert not outcome["wrong"]
    assert all(outcome["written"].values())
