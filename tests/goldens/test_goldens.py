"""Stored modules are planned and written as before, without a compiler; see `make.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memplan.program import compat
from tests.goldens import expected
from tests.goldens.facts import module_facts, plan_facts, shaping_facts
from tests.goldens.planned import Case, cases
from tests.goldens.printed import digest_of

CASES = cases()
DIVIDED = [key for key, case in CASES.items() if case.partitioned_file]
PLANNED = [(key, share) for key, case in CASES.items() for share in case.budgets or ()]


def stored(facts: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(facts))


@pytest.mark.parametrize(("key", "share"), PLANNED, ids=["-".join(one) for one in PLANNED])
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


@pytest.mark.parametrize("key", CASES)
def test_digest_does_not_depend_on_how_the_module_was_written(key: str) -> None:
    """A module that went through XLA's parser has other numbers, and other computations come first."""
    case: Case = CASES[key]
    printed = compat.module_text(case.proto)
    assert digest_of(compat.module_text(compat.module_proto(printed))) == digest_of(printed)
