"""Training steps of the 3D U-Net on one whole volume, for memplan and its command line.

    FACTORY=experiments.applications.segmentation.training:factory
    memplan inspect $FACTORY --budget 15GiB --device v100

The optimizer and its schedule are nnU-Net's (Isensee et al., Nature Methods 2021).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.losses import dice_cross_entropy
from models.train import Batch, Built, Step, unet3d_step
from models.train import make_step as descend
from models.unet3d import UNet3D, UNet3DConfig

Apply = Callable[[Any, Any], Any]
"""Flax's `module.apply`: ({"params": params}, image [1, X, Y, Z, M]) -> logits [1, X, Y, Z, C]."""


def batch_of(volume: Volume) -> Batch:
    """The volume as a batch of one on the host.

    "image" is float32 [1, X, Y, Z, M], "label" int32 [1, X, Y, Z].
    """
    return {"image": np.asarray(volume.image)[None], "label": np.asarray(volume.label)[None]}


def poly_sgd(
    steps: int = 1000, rate: float = 1e-2, momentum: float = 0.99
) -> optax.GradientTransformation:
    """SGD with Nesterov momentum; the rate falls from `rate` to 0 as (1 - t / steps)^0.9."""
    return optax.sgd(
        optax.polynomial_schedule(rate, 0.0, 0.9, steps), momentum=momentum, nesterov=True
    )


def make_step(model_apply: Apply, optimizer: optax.GradientTransformation) -> Step:
    """A pure, unjitted step(state, batch) -> (state, {"loss": scalar}) on Dice plus cross-entropy.

    `state` is a `models.train.TrainState`, `batch` as from `batch_of`.
    """

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits = model_apply({"params": params}, batch["image"])
        return dice_cross_entropy(logits, batch["label"]), batch_stats

    return descend(loss, optimizer)


def factory(
    size: int = 144, config: UNet3DConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *, concrete: bool = False, seed: int = 0,
) -> Built:  # fmt: skip
    """(step, (state, batch)) for one volume of `size`^3 voxels; default optimizer `poly_sgd()`.

    Arguments are trees of `jax.ShapeDtypeStruct`, and nothing is allocated; with `concrete=True`
    they are an initialised state and a random volume. ValueError: `size` cannot be halved
    `config.levels - 1` times.
    """
    config, optimizer = config or UNet3DConfig(), optimizer or poly_sgd()
    _, args = unet3d_step(size, config=config, optimizer=optimizer, concrete=concrete, seed=seed)
    return make_step(UNet3D(config).apply, optimizer), args
