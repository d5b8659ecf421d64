"""Stored modules are planned and written as before, without a compiler; see `make.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.goldens import expected
from tests.goldens.facts import module_facts, plan_facts, shaping_facts
from tests.goldens.planned import cases

CASES = cases()
DIVIDED = [key for key, case in CASES.items() if case.partitioned_file]
# Planning takes two seconds or more. Another budget of each but the largest is planned by default.
SLOW = {
    ("data-parallel-v100", "0.4"),
    ("data-parallel-v100", "0.6"),
    ("decoder-bfloat16-h100", "0.4"),
    ("decoder-dropout-a100", "0.4"),
    ("decoder-h100", "0.4"),
    ("fsdp-a100", "0.4"),
    ("kernels-of-2d-u-net-h200", "0.4"),
    ("kernels-of-2d-u-net-h200", "0.8"),
    ("kernels-of-decoder-bfloat16-h200", "0.6"),
    ("tensor-parallel-a100", "0.4"),
    ("tensor-parallel-a100", "0.6"),
}
PLANNED = [
    pytest.param(
        key,
        share,
        id=f"{key}-{share}",
        marks=[pytest.mark.slow] if (key, share) in SLOW else [],
    )
    for key, case in CASES.items()
    for share in case.budgets or ()
]


def stored(facts: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(facts))


@pytest.mark.parametrize(("key", "share"), PLANNED)
def test_plan_and_written_module(key: str, share: str) -> None:
    case = CASES[key]
    assert stored(plan_facts(case, share)) == expected.read(case)["plans"][share]


@pytest.mark.parametrize("key", CASES)
def test_problem_seconds_and_source_lines(key: str) -> None:
    case = CASES[key]
    assert stored(module_facts(case)) == expected.read(case)["module"]


@pytest.mark.parametrize("key", DIVIDED)
def test_shaped_collectives(key: str) -> None:
    case = CASES[key]
    assert stored(shaping_facts(case)) == expected.read(case)["shaped"]
