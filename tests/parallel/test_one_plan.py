"""Processes over gloo: one plans, the others follow; one with another step is refused."""

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
    """A plan keeps the results' bits; `jax.jit` may add the processes' parts in another order."""
    code, output = launched(SCRIPT, processes, "--share", "0.75", *words)
    assert code == 0, output
    facts = [
        json.loads(line[line.index("{") :])
        for line in output.splitlines()
        if '"fingerprint"' in line
    ]
    assert {rank["rank"] for rank in facts} == set(range(processes))
    assert (
        len({rank["fingerprint"] for rank in facts}) == len({rank["plan"] for rank in facts}) == 1
    )
    for rank in facts:
        assert rank["peak"] <= rank["budget"]
        assert rank["planned"] == rank["unplanned"]
        assert rank["planned"]["losses"] == pytest.approx(rank["by jax"]["losses"], rel=1e-6)


@pytest.mark.slow
def test_a_rank_with_another_step_is_refused() -> None:
    code, output = launched(SCRIPT, 2, "--odd", "1")
    assert code == 1 and "its equations on rank 1" in output
