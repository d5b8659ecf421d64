"""Some of these steps for GPUs that are absent: planned within a share of their bytes, with as many calls of Python."""

from __future__ import annotations

from typing import Any

import pytest

import memplan
from tests.cases.test_branches import skipped_if_not_finite
from tests.cases.test_effects import watched
from tests.cases.within_share import Make


def told(make: Any) -> Make:
    """A step that tells, without a listener."""
    return lambda: make(lambda *_: None)


def calls(planned: Any) -> int:
    return planned._outcome.executable.text.count(
        'custom_call_target="xla_ffi_python_gpu_callback"'
    )


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(skipped_if_not_finite, 0.75, marks=pytest.mark.slow),
        (told(watched), 0.75),
    ],
)
def test_a_step_is_planned(make: Make, share: float) -> None:
    step, args = make()
    plain = memplan.jit(step, device="a100", donate_argnums=0).plan(*args)
    budget = int(share * plain.report.compiled_peak_bytes)
    planned = memplan.jit(step, budget=budget, device="a100", donate_argnums=0, split=False).plan(
        *args
    )
    report = planned.report
    assert report.status == "fits" and report.compiled_peak_bytes <= min(
        budget, report.predicted_peak_bytes
    )
    assert report.recomputations_found or report.copies_found
    assert calls(planned) == calls(plain)
