import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.losses import (
    auxiliary_cross_entropy,
    cross_entropy,
    deep_supervision_loss,
    deep_supervision_weights,
    dice_cross_entropy,
    shrink_nearest,
    soft_dice_loss,
)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_cross_entropy_equals_optax_and_has_no_scatter():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(3, 4, 5)).astype(np.float32), draw.integers(5, size=(3, 4))
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-5)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(cross_entropy))(logits, labels))


def test_dice_loss_is_zero_for_the_truth_and_one_for_its_opposite():
    labels = jnp.array([[[0, 1], [1, 0]]])
    certain = 100.0 * jax.nn.one_hot(labels, 2)
    np.testing.assert_allclose(soft_dice_loss(certain, labels), 0.0, atol=1e-5)
    np.testing.assert_allclose(soft_dice_loss(certain, 1 - labels), 1.0, atol=1e-5)


def test_auxiliary_classifiers_count_three_tenths(quick_jit):
    outputs, labels = [drawn(2, 3 + number)[:, :3] for number in range(3)], jnp.array([0, 2])
    main, first, second = (quick_jit(cross_entropy)(logits, labels) for logits in outputs)
    value = quick_jit(auxiliary_cross_entropy)(outputs, labels)
    np.testing.assert_allclose(value, main + 0.3 * first + 0.3 * second, rtol=1e-6)


@pytest.mark.parametrize(
    ("scales", "weights"),
    [(1, [1]), (2, [1, 0]), (3, [2 / 3, 1 / 3, 0]), (5, [8 / 15, 4 / 15, 2 / 15, 1 / 15, 0])],
)
def test_deep_supervision_halves_normalizes_and_leaves_out_the_last(scales, weights):
    assert deep_supervision_weights(scales) == pytest.approx(weights, rel=1e-12, abs=0)


def test_deep_supervision_sums_the_scales(quick_jit):
    labels = jnp.asarray(np.random.default_rng(0).integers(3, size=(2, 8, 4)))
    outputs = [drawn(2, 8, 4, 3), drawn(2, 4, 2, 3), drawn(2, 2, 2, 3)]
    measure = quick_jit(dice_cross_entropy)
    expected = (2 * measure(outputs[0], labels) + measure(outputs[1], labels[:, 1::2, 1::2])) / 3
    value, gradients = quick_jit(jax.value_and_grad(deep_supervision_loss))(outputs, labels)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert [bool(gradient.any()) for gradient in gradients] == [True, True, False]


@pytest.mark.parametrize("size", [(8, 12), (4, 12), (4, 6), (2, 3), (1, 1)], ids=str)
def test_labels_shrink_to_the_nearest(size):
    """The same as `jax.image.resize`, but without a gather."""
    labels = jnp.arange(2 * 8 * 12).reshape(2, 8, 12)
    np.testing.assert_array_equal(
        shrink_nearest(labels, size), jax.image.resize(labels, (2, *size), "nearest")
    )
    assert "gather" not in str(jax.make_jaxpr(lambda labels: shrink_nearest(labels, size))(labels))
