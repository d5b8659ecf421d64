"""Real processes with gloo between them: one plans, the others follow; one that compiles another step is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.distributed.failures.run import Run

SCRIPT = Path(__file__).parent / "planned.py"


def launched(tmp_path: Path, processes: int, *options: str) -> Run:
    return Run(tmp_path, options, launcher=("--devices", "1"), processes=processes, script=SCRIPT)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_follow_one_plan(tmp_path: Path, processes: int) -> None:
    run = launched(tmp_path, processes, "--share", "0.75")
    run.wait(180)
    output = run.told + "".join(run.output)
    told = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"fingerprint"' in line]
    assert {one["rank"] for one in told} == set(range(processes))
    assert len({one["fingerprint"] for one in told}) == len({one["plan"] for one in told}) == 1
    for one in told:
        assert one["peak"] <= one["budget"]
        assert all(expected == found for expected, found in one["losses"])


@pytest.mark.slow
def test_a_rank_with_another_step_is_named(tmp_path: Path) -> None:
    run = launched(tmp_path, 2, "--odd", "1")
    run.wait(120)
    output = run.told + "".join(run.output)
    assert "rank 1" in output and "has another program" in output
