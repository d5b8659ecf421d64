"""Learning rates for large batches."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from experiments.applications.large_batch.rates import Epochs, at_least_matrices, scaled_rate, warmed_up


def test_the_paper_s_own_numbers() -> None:
    """ResNet-50 on ImageNet: 0.1 for 256, so 3.2 for 8192, reached in five epochs."""
    epochs = Epochs(1_281_167, 8192)
    assert epochs.steps_per_epoch == 156
    peak = scaled_rate(0.1, 256, 8192)
    assert peak == pytest.approx(3.2)
    warm, falls = epochs.steps(5), {epochs.steps(at) - epochs.steps(5): 0.1 for at in (30, 60, 80)}
    rate = warmed_up(optax.piecewise_constant_schedule(peak, falls), warm, start=0.1)
    at = [0, warm // 2, warm, epochs.steps(30) - 1, epochs.steps(30), epochs.steps(80)]
    assert [float(rate(step)) for step in at] == pytest.approx([0.1, 1.65, 3.2, 3.2, 0.32, 0.0032])


def test_the_square_root_rule() -> None:
    assert scaled_rate(0.1, 256, 1024, power=0.5) == pytest.approx(0.2)
    assert scaled_rate(scaled_rate(0.1, 32, 48), 48, 96) == pytest.approx(scaled_rate(0.1, 32, 96))


def test_norms_and_biases_are_no_matrices() -> None:
    params = {"kernel": np.ones((2, 2)), "bias": np.ones(2), "scale": np.ones(())}
    assert at_least_matrices(params) == {"kernel": True, "bias": False, "scale": False}
