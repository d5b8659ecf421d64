"""Training losses: scalars of logits and integer labels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

AUXILIARY_WEIGHT = 0.3
"""Weight of each auxiliary classifier's loss (Szegedy et al., 2015)."""


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy in nats of logits (..., classes) against integer labels (...).

    Multiplies by one-hot labels, because the gradient of indexing would be a scatter.
    """
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -(one_hot * jax.nn.log_softmax(logits)).sum(-1).mean()


def soft_dice_loss(logits: jax.Array, labels: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """One minus the soft Dice overlap (Milletari et al., 2016), averaged over classes, in [0, 1].

    logits (batch, *spatial, classes), integer labels (batch, *spatial); sums over batch and space.
    """
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    axes = tuple(range(logits.ndim - 1))
    shares = jax.nn.softmax(logits)
    overlap = (shares * one_hot).sum(axes)
    total = shares.sum(axes) + one_hot.sum(axes)
    return 1 - ((2 * overlap + epsilon) / (total + epsilon)).mean()


def dice_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`cross_entropy` plus `soft_dice_loss`."""
    return cross_entropy(logits, labels) + soft_dice_loss(logits, labels)


def auxiliary_cross_entropy(outputs: Sequence[jax.Array], labels: jax.Array) -> jax.Array:
    """`cross_entropy` of the first logits (batch, classes), plus weighted ones of the others."""
    main, *auxiliary = (cross_entropy(logits, labels) for logits in outputs)
    return main + AUXILIARY_WEIGHT * sum(auxiliary)


def deep_supervision_weights(scales: int) -> tuple[float, ...]:
    """Weights of `scales` outputs, finest first, that sum to one (Isensee et al., 2021).

    Each weight is half the previous one, and the last is zero, unless it is the only one.
    """
    halves = [0.5**scale for scale in range(max(1, scales - 1))]
    return (*(half / sum(halves) for half in halves), *(0.0,) * (scales - len(halves)))


def deep_supervision_loss(outputs: Sequence[jax.Array], labels: jax.Array) -> jax.Array:
    """Weighted sum of `dice_cross_entropy` over the scales.

    Compares logits (batch, *spatial / factors, classes) with the nearest labels of (batch,
    *spatial).
    """
    weights = deep_supervision_weights(len(outputs))
    losses = [
        weight * dice_cross_entropy(logits, shrink_nearest(labels, logits.shape[1:-1]))
        for weight, logits in zip(weights, outputs, strict=True)
        if weight
    ]
    return jnp.stack(losses).sum()


def shrink_nearest(labels: jax.Array, size: Sequence[int]) -> jax.Array:
    """The labels (batch, *spatial) nearest to the centers of `size` equal cells; ties go up."""
    steps = [extent // cells for extent, cells in zip(labels.shape[1:], size, strict=True)]
    return labels[(slice(None), *(slice(step // 2, None, step) for step in steps))]
