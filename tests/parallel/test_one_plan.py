"""Real processes with gloo between them: one plans, the others follow; one that traces another step is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.processes import launched

SCRIPT = Path(__file__).parent / "planned.py"


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_follow_one_plan(processes: int) -> None:
    code, output = launched(SCRIPT, processes, "--share", "0.75")
    assert code == 0, output
    told = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"fingerprint"' in line]
    assert {one["rank"] for one in told} == set(range(processes))
    assert len({one["fingerprint"] for one in told}) == len({one["plan"] for one in told}) == 1
    for one in told:
        assert one["peak"] <= one["budget"]
        assert all(expected == found for expected, found in one["losses"])


@pytest.mark.slow
def test_a_rank_with_another_step_is_refused() -> None:
    code, output = launched(SCRIPT, 2, "--odd", "1")
    assert code == 1 and "its equations on rank 1" in output
