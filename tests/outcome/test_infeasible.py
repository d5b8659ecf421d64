"""What an error says where nothing fits: the floor, the kernel that sets it, what to try."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memplan.compilation.callback import PlannedModule
from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.outcome import infeasible as errors
from memplan.outcome.infeasible import floor_of, infeasible
from memplan.program.trace import StateOnHost
from tests.compilation.modules import LEAST, scheduled
from tests.compilation.outcomes import PROGRAM, outcome


def test_the_error_names_the_floor_its_kernel_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "floor_of", lambda found: (60, "gemm.1 (model.py:3)"))
    found = outcome(PROGRAM, 120, host_bytes=70, predicted_to_fit=False)
    error = infeasible(found)
    assert isinstance(error, InfeasibleBudgetError)
    assert (error.floor_bytes, error.smallest_bytes, error.operation) == (60, 120, "gemm.1 (model.py:3)")
    for said in (
        "no plan fits 100 B on v100",
        "takes 120 B, with 70 B on the host",
        "take 60 B",
        "a budget of 120 bytes",
    ):
        assert said in str(error)
    assert "donate_argnums" not in str(error)  # arguments are a tenth of the budget


def advice(found: Outcome, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(errors, "floor_of", lambda found: (60, "gemm.1"))
    return str(infeasible(found)).partition("Try:")[2]


def test_state_that_is_most_of_it_may_be_donated_or_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(PROGRAM, 120)
    plain = SimpleNamespace(device_bytes=500, resident_bytes=51)  # of a budget of 100
    large = replace(found, planned=cast(Any, SimpleNamespace(plain=plain)))
    assert "donate_argnums" in advice(large, monkeypatch) and "host_state" in advice(large, monkeypatch)
    moved = replace(large, program=PROGRAM.transform(StateOnHost(frozenset({0}), frozenset()), None))
    assert "host_state" not in advice(moved, monkeypatch)
    on_cpu = replace(large, target=cast(Any, SimpleNamespace(device=large.target.device, is_gpu=False)))
    assert "host_state" not in advice(on_cpu, monkeypatch)


def test_the_smallest_may_be_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "floor_of", lambda found: (60, "gemm.1"))
    assert infeasible(outcome(PROGRAM, 600)).smallest_bytes == 500


def test_no_order_goes_below_the_floor() -> None:
    plain = scheduled()
    found = replace(outcome(PROGRAM, 2 * plain.device_bytes), planned=PlannedModule(plain, plain))
    nbytes, operation = floor_of(found)
    assert operation in {kernel.name for kernel in plain.problem.kernels}
    assert plain.resident_bytes < nbytes <= plain.resident_bytes + LEAST
    assert floor_of(replace(found, executable=outcome(PROGRAM, 7).executable))[0] == 7
