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
# By share of the bytes, planned by default: the quickest of every device, kind of step and of plan.
BY_DEFAULT = {
    "0.4": (
        "mlp-bfloat16-h100 mlp-cpu mlp-undonated-a100 mlp-v100 pinned-a100 pinned-recompute-v100"
        " u-net-2d-v100 u-net-3d-v100"
    ),
    "0.6": (
        "branching-a100 kernels-of-2d-u-net-h200 mlp-v100 pinned-cpu pinned-recompute-v100"
        " pooling-cpu slabs-v100 u-net-2d-cpu u-net-3d-v100"
    ),
    "0.8": (
        "branching-a100 cholesky-cpu conv-net-cpu conv-net-v100 custom-vjp-a100 data-parallel-v100"
        " decoder-dropout-a100 embedding-a100 embedding-cpu fft-v100 fsdp-a100 looping-v100"
        " mlp-bfloat16-h100 mlp-undonated-a100 pinned-a100 pinned-scanned-v100 pooling-cpu"
        " pooling-v100 scanned-cpu slabs-v100 tensor-parallel-a100 u-net-2d-v100"
    ),
    "0.95": "filled-v100 fsdp-scanned-a100 looping-cpu looping-v100 scanned-v100",
}
PLANNED = [
    pytest.param(
        key,
        share,
        id=f"{key}-{share}",
        marks=[] if key in BY_DEFAULT[share].split() else [pytest.mark.slow],
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
