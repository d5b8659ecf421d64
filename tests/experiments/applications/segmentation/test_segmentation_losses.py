"""Losses and scores against values computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.applications.segmentation.losses import dice_cross_entropy, hard_dice


def certain(labels: np.ndarray, classes: int) -> jax.Array:
    """Logits that put all weight on `labels`."""
    return 100.0 * jax.nn.one_hot(labels, classes)


def test_hard_dice_by_hand() -> None:
    """Class 0: 2*2/(3+2); class 1: 2*1/(1+3); class 2: 2*1/(2+1)."""
    labels = jnp.array([0, 0, 1, 1, 1, 2])
    predicted = jnp.array([0, 0, 0, 1, 2, 2])
    np.testing.assert_allclose(hard_dice(predicted, labels, 3), [4 / 5, 2 / 4, 2 / 3], rtol=1e-6)


def test_hard_dice_of_absent_classes() -> None:
    """Class 2 is a false positive, class 3 is missed, class 4 is in neither map."""
    scores = hard_dice(jnp.array([[0, 1], [2, 2]]), jnp.array([[0, 1], [3, 3]]), 5)
    np.testing.assert_array_equal(scores, [1, 1, 0, 0, np.nan])
    assert scores.dtype == jnp.float32


def test_hard_dice_is_symmetric() -> None:
    a, b = np.random.default_rng(0).integers(0, 4, (2, 5, 5, 5))
    np.testing.assert_array_equal(hard_dice(a, b, 4), hard_dice(b, a, 4))


def test_certain_and_right_costs_nothing() -> None:
    labels = np.arange(64).reshape(1, 4, 4, 4) % 4
    assert float(dice_cross_entropy(certain(labels, 4), jnp.asarray(labels))) == pytest.approx(
        0, abs=1e-5
    )


def test_certain_and_wrong_costs_the_margin_and_all_of_dice() -> None:
    labels = np.arange(64).reshape(1, 4, 4, 4) % 4
    assert float(
        dice_cross_entropy(certain(labels, 4), jnp.asarray(labels + 1) % 4)
    ) == pytest.approx(101, rel=1e-5)


def test_undecided_by_hand() -> None:
    """Two classes at 1/2 each, labels 3:1: Dice 2*1.5/(2+3), 2*0.5/(2+1); cross-entropy log 2."""
    labels = jnp.array([0, 0, 0, 1])
    expected = np.log(2) + 1 - (3 / 5 + 1 / 3) / 2
    assert float(dice_cross_entropy(jnp.zeros((4, 2)), labels)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("absent", [False, True])
def test_gradient_is_finite(scale: float, absent: bool) -> None:
    """Also with a saturated softmax, or without one of the classes."""
    generator = np.random.default_rng(0)
    logits = jnp.asarray(scale * generator.standard_normal((1, 4, 4, 4, 4)), jnp.float32)
    labels = jnp.asarray(generator.integers(0, 3 if absent else 4, (1, 4, 4, 4)))
    value, gradient = jax.value_and_grad(dice_cross_entropy)(logits, labels)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_half_precision_logits_are_summed_in_single() -> None:
    labels = jnp.zeros((1, 32, 32, 32), jnp.int32)
    loss = dice_cross_entropy(jnp.zeros((1, 32, 32, 32, 4), jnp.bfloat16), labels)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(np.log(4) + 1 - 0.4 / 4, rel=1e-4)


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="without its last axis"):
        dice_cross_entropy(jnp.zeros((4, 4, 2)), jnp.zeros((4, 1), jnp.int32))
    with pytest.raises(ValueError, match="one shape"):
        hard_dice(jnp.zeros((4, 4)), jnp.zeros((4, 1)), 2)
