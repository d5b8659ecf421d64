"""The tests of what uses OR-tools, in a process of their own: highspy and OR-tools each bring a libhighs.so.1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_planners_on_stages_pass_their_tests_in_a_process_of_their_own() -> None:
    folders = [TESTS / "planning" / "planners", TESTS / "experiments" / "planners"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "slow or not slow",
            *folders,
        ],
        env={**os.environ, "MEMPLAN_APART": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
