"""Real processes with gloo between them: one plans, the others follow; one that traces another step is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parallel.processes import launched

SCRIPT = Path(__file__).parent / "planned.py"


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (2, ()),
        pytest.param(4, (), marks=pytest.mark.slow),
        pytest.param(4, ("--split",), marks=pytest.mark.slow),
    ],
)
def test_all_processes_follow_one_plan(processes: int, words: Sequence[str]) -> None:
    """A plan keeps the bits of the step without one; `jax.jit` adds the parts of four processes in another order."""
    code, output = launched(SCRIPT, processes, "--share", "0.75", *words)
    assert code == 0, output
    told = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"fingerprint"' in line]
    assert {one["rank"] for one in told} == set(range(processes))
    assert len({one["fingerprint"] for one in told}) == len({one["plan"] for one in told}) == 1
    for one in told:
        assert one["peak"] <= one["budget"]
        assert one["planned"] == one["unplanned"]
        assert one["planned"]["losses"] == pytest.approx(one["by jax"]["losses"], rel=1e-6)


@pytest.mark.slow
def test_a_rank_with_another_step_is_refused() -> None:
    code, output = launched(SCRIPT, 2, "--odd", "1")
    assert code == 1 and "its equations on rank 1" in output
