"""Schedules at chosen steps against the rules they are named after, and updates of LARS and LAMB by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import MemplanError, ScheduleError
from memplan.parallel.large_batch import Epochs, Schedule, lamb, lars, rescaled, scaled_rate, warmed_up

STEPS = 500
counts = st.integers(1, 2**15)
rates = st.floats(1e-6, 1e3)
schedules = st.sampled_from(
    [
        optax.constant_schedule(0.4),
        optax.cosine_decay_schedule(0.4, 500),
        optax.piecewise_constant_schedule(0.4, {100: 0.1, 300: 0.1}),
        optax.exponential_decay(0.4, 50, 0.9),
    ]
)
quickly = settings(max_examples=25, deadline=None, derandomize=True)


def told(schedule: Schedule) -> np.ndarray:
    """The first rates, float32 [STEPS]."""
    return np.broadcast_to(np.asarray(schedule(jnp.arange(STEPS)), np.float32), STEPS)


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


@given(rates, counts, counts, counts)
def test_scaling_twice_is_scaling_once(rate: float, a: int, b: int, c: int) -> None:
    assert scaled_rate(scaled_rate(rate, a, b), b, c) == pytest.approx(scaled_rate(rate, a, c))
    assert scaled_rate(rate, a, a) == pytest.approx(rate)


def test_the_square_root_rule_and_none() -> None:
    assert scaled_rate(0.1, 256, 1024, power=0.5) == pytest.approx(0.2)
    assert scaled_rate(0.1, 256, 1024, power=0) == pytest.approx(0.1)
    assert float(rescaled(0.1, 256, 1024, 5, 5, power=0.5)(10)) == pytest.approx(0.2)


@given(counts, counts, st.floats(0, 100))
def test_epochs_have_whole_batches(examples: int, batch: int, epochs: float) -> None:
    if batch > examples:
        with pytest.raises(ScheduleError, match="larger than the training set"):
            Epochs(examples, batch)
        return
    counted = Epochs(examples, batch)
    assert 0 <= examples - batch * counted.steps_per_epoch < batch
    assert abs(counted.steps(epochs) - epochs * counted.steps_per_epoch) <= 0.5
    assert counted.steps(7) == 7 * counted.steps_per_epoch


@quickly
@given(schedules, st.integers(0, 60), st.floats(0, 1))
def test_a_warm_up_ends_where_the_schedule_begins(schedule: Schedule, warm: int, start: float) -> None:
    rate = told(warmed_up(schedule, warm, start))
    np.testing.assert_array_equal(rate[warm:], told(schedule)[: STEPS - warm])
    assert rate[0] == pytest.approx(start if warm else 0.4, abs=1e-6)
    rises = np.diff(rate[: warm + 1])
    np.testing.assert_allclose(rises, (0.4 - start) / max(1, warm), atol=1e-6)


@quickly
@given(schedules, counts, counts, st.integers(0, 200), st.integers(1, 60))
def test_a_restart_scales_and_goes_on_by_examples(schedule: Schedule, old: int, new: int, at: int, warm: int) -> None:
    rate = rescaled(schedule, old, new, at, warm)
    found = told(rate)
    np.testing.assert_array_equal(found[:at], told(schedule)[:at])
    assert found[at] == pytest.approx(float(schedule(at)), rel=1e-2)
    for steps in (warm, warm + 1, 3 * warm):
        expected = new / old * float(schedule(at + steps * new // old))
        assert found[at + steps] == pytest.approx(expected, rel=1e-4, abs=1e-7)


@quickly
@given(st.sampled_from([(32, 64), (64, 32), (96, 128), (8, 8), (256, 248)]), st.integers(0, 50), st.integers(1, 40))
def test_a_restart_does_not_jump(batches: tuple[int, int], at: int, warm: int) -> None:
    """A constant rate changes by equal parts of the difference, and not at all before and after."""
    old, new = batches
    rate = told(rescaled(0.1, old, new, at, warm))
    changes, part = np.diff(rate), 0.1 * (new / old - 1) / warm
    np.testing.assert_allclose(changes[at : at + warm], part, atol=1e-6)
    assert not changes[:at].any() and not changes[at + warm :].any()


def test_there_and_back_again() -> None:
    """Half the processes leave for a while: as many examples later, the rate is that of an undisturbed training."""
    usual = optax.cosine_decay_schedule(0.8, 1000)
    both = rescaled(rescaled(usual, 64, 32, 100, 10), 32, 64, 300, 10)  # 200 half steps in between
    assert float(both(99)) == pytest.approx(float(usual(99)))
    assert float(both(200)) == pytest.approx(float(usual(150)) / 2)
    assert float(both(350)) == pytest.approx(float(usual(250)))
    assert float(both(1100)) == pytest.approx(0, abs=1e-6)


def test_many_steps_stay_within_int32() -> None:
    last = 2**30
    slower = rescaled(lambda step: jnp.asarray(step, jnp.float32), 40961, 40960, 0, 1)
    assert float(jax.jit(slower)(jnp.int32(last))) == pytest.approx(last * (40960 / 40961) ** 2, rel=1e-6)
    with pytest.raises(ScheduleError, match="common divisor"):
        rescaled(0.1, 2**16, 2**16 - 1, 0, 1)


@pytest.mark.parametrize(
    "schedule",
    [warmed_up(0.4, 5, 0.1), warmed_up(0.4, 0, 0.1), rescaled(0.4, 32, 64, 3, 2)],
    ids=["warmed up", "no warm-up", "rescaled"],
)
def test_rates_are_float32_scalars_under_jit_and_outside(schedule: Schedule) -> None:
    with jax.enable_x64(True):
        for step in (0, np.int64(4), jnp.int32(7)):
            for rate in (schedule(step), jax.jit(schedule)(step)):
                assert isinstance(rate, jax.Array) and rate.dtype == jnp.float32 and rate.shape == ()


PARAMS = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.array([3.0, 4.0]), "scale": jnp.ones(())}
GRADIENT = {"kernel": jnp.array([[0.0, 6.0], [8.0, 0.0]]), "bias": jnp.array([6.0, 8.0]), "scale": jnp.ones(())}


def first_update(optimizer: optax.GradientTransformation, params: Any = None) -> Any:
    params = PARAMS if params is None else params
    return optimizer.update(GRADIENT, optimizer.init(params), params)[0]


def test_lars_takes_the_length_of_weights_for_matrices_alone() -> None:
    found = first_update(lars(2.0, trust_coefficient=0.01))
    np.testing.assert_allclose(found["kernel"], -2 * 0.01 * (5 / 10) * GRADIENT["kernel"], rtol=1e-6)
    np.testing.assert_allclose(found["bias"], -2 * GRADIENT["bias"])
    np.testing.assert_allclose(found["scale"], -2.0)


def test_lars_decays_matrices_alone_and_measures_the_decay_too() -> None:
    found = first_update(lars(2.0, trust_coefficient=0.01, weight_decay=0.5))
    whole = GRADIENT["kernel"] + 0.5 * PARAMS["kernel"]
    np.testing.assert_allclose(found["kernel"], -0.02 * 5 / math.sqrt(106.25) * whole, rtol=1e-6)
    np.testing.assert_allclose(found["bias"], -2 * GRADIENT["bias"])


def test_lamb_moves_a_matrix_by_a_share_of_its_length() -> None:
    found = first_update(lamb(0.01))
    assert float(jnp.linalg.norm(found["kernel"])) == pytest.approx(0.01 * 5, rel=1e-5)
    plain = first_update(optax.adam(0.01, eps=1e-6))
    np.testing.assert_allclose(found["bias"], plain["bias"], rtol=1e-6)
    decayed = first_update(lamb(0.01, weight_decay=0.5))
    np.testing.assert_allclose(decayed["bias"], plain["bias"], rtol=1e-6)
    assert not np.allclose(decayed["kernel"], found["kernel"])


@pytest.mark.parametrize(("ours", "optax_s"), [(lars, optax.lars), (lamb, optax.lamb)], ids=["lars", "lamb"])
def test_for_matrices_they_are_optax_s(ours: Callable[..., Any], optax_s: Callable[..., Any]) -> None:
    rate = warmed_up(0.5, 3, 0.1)
    mine, theirs = (make(rate, weight_decay=0.01) for make in (ours, optax_s))
    params, gradient = PARAMS["kernel"], GRADIENT["kernel"]
    states = mine.init(params), theirs.init(params)
    for _ in range(4):
        (found, first), (expected, second) = (
            optimizer.update(gradient, state, params) for optimizer, state in zip((mine, theirs), states, strict=True)
        )
        states = first, second
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_masks_can_be_given() -> None:
    everything = lars(2.0, trust_coefficient=0.01, adapted=lambda params: jax.tree.map(lambda _: True, params))
    np.testing.assert_allclose(first_update(everything)["bias"], -0.02 * 0.5 * GRADIENT["bias"], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: scaled_rate(-0.1, 32, 64), "rate is -0.1"),
        (lambda: scaled_rate(math.nan, 32, 64), "rate is nan"),
        (lambda: scaled_rate(0.1, 0, 64), "base_batch is 0"),
        (lambda: scaled_rate(0.1, 32, 64.0), "global_batch is 64.0"),  # type: ignore[arg-type]
        (lambda: scaled_rate(0.1, 32, 64, -1), "power is -1"),
        (lambda: Epochs(100, 0), "global_batch is 0"),
        (lambda: Epochs(100, 101), "global batch of 101 is larger than the training set of 100"),
        (lambda: Epochs(100, 10).steps(-1), "epochs is -1"),
        (lambda: warmed_up(0.1, -1, 0.1), "warmup_steps is -1"),
        (lambda: warmed_up(math.inf, 1, 0.1), "rate is inf"),
        (lambda: warmed_up(lambda step: -1.0, 1, 0.1), "first rate of the schedule is -1.0"),
        (lambda: warmed_up(0.1, 1, math.nan), "start is nan"),
        (lambda: warmed_up("0.1", 1, 0.1), "rate is '0.1'"),  # type: ignore[arg-type]
        (lambda: rescaled(0.1, 32, True, 0, 1), "new_batch is True"),
        (lambda: rescaled(0.1, 32, 64, -1, 1), "at_step is -1"),
        (lambda: rescaled(0.1, 32, 64, 0, 0), "warmup_steps is 0, not an integer of at least 1"),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ScheduleError, match=named) as caught:
        make()
    assert isinstance(caught.value, MemplanError) and isinstance(caught.value, ValueError)
    assert str(caught.value).count(".") >= 2  # what happened, and what to try
