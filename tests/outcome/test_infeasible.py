"""What an error says where nothing fits: the floor, the kernel that sets it, what to try."""

from __future__ import annotations

import pytest

from memplan.errors import InfeasibleBudgetError
from memplan.outcome import infeasible as errors
from memplan.outcome.infeasible import infeasible
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
