"""The training loss of a segmentation, soft Dice plus cross-entropy, and its score, hard Dice.

The loss is nnU-Net's (Isensee et al., Nature Methods 2021) up to a constant. Its two terms are in
`models.train`.
"""

import jax
import jax.numpy as jnp

from models.train import cross_entropy, soft_dice_loss


def dice_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats plus one minus the mean soft Dice, a scalar of at least float32.

    logits [..., C], integer labels [...] in 0 to C - 1. Unlike nnU-Net's, the Dice term includes
    the background. A label out of range counts as no class, as tracing cannot see it; `decathlon`
    rejects it when reading.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} must have the shape of logits {logits.shape} without its last "
            "axis."
        )
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return cross_entropy(wide, labels) + soft_dice_loss(wide, labels)


def hard_dice(predicted: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    """Dice overlap 2 |P and L| / (|P| + |L|) per class, float32 [classes] in 0 to 1 (Dice, 1945).

    `predicted` and `labels` are integer class maps of one shape with fewer than 2^30 voxels. A
    class absent from both is NaN: average over cases with `nanmean`, as nnU-Net does.
    """
    if predicted.shape != labels.shape:
        raise ValueError(
            f"predicted {predicted.shape} and labels {labels.shape} must have one shape."
        )
    axes = tuple(range(labels.ndim))
    predicted_masks, label_masks = (
        maps[..., None] == jnp.arange(classes) for maps in (predicted, labels)
    )
    overlap = (predicted_masks & label_masks).sum(axes)
    total = predicted_masks.sum(axes) + label_masks.sum(axes)
    return jnp.where(total > 0, 2 * overlap / jnp.maximum(total, 1), jnp.nan).astype(jnp.float32)
