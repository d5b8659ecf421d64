"""Training steps small enough for interpreted kernels, and a planner that moves what others would recompute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.planning.problem import Problem
from memplan.planning.registry import PLANNERS
from memplan.planning.solution import Solution
from memplan.planning.timing import CopySeconds
from models import train
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import STAGES, GoogLeNetConfig
from models.resnet import ResNetConfig
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig


@dataclass(frozen=True)
class CheapCopies:
    """memplan's own planner, for whom a copy takes no time: at toy size recomputing is faster than any real link."""

    name: str = "cheap copies"

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Solution:
        free = None if copy_s is None else lambda nbytes: 1e-12 * nbytes
        return PLANNERS["kernels"].plan(problem, budget_nbytes, host_nbytes, free)


def mlp(layers: int = 6, width: int = 64, rows: int = 4096) -> tuple[Any, Any]:
    """Tanh layers and a mean square, by gradient descent: step(params, batch) -> (params, loss)."""
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((width, width)).astype(np.float32) / 8 for _ in range(layers)]
    batch = draw.standard_normal((rows, width)).astype(np.float32)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step, jax.tree.map(jnp.asarray, (params, batch))


def convolutions() -> tuple[Any, Any]:
    """Three convolutions over one picture whose planes are what takes memory: it can be made slab by slab."""
    draw = np.random.default_rng(0)
    filters = [draw.standard_normal((3, 3, 8, 8)).astype(np.float32) / 8 for _ in range(3)]
    picture = draw.standard_normal((1, 256, 256, 8)).astype(np.float32)

    def loss(filters: Any, x: Any) -> Any:
        for w in filters:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))
        return (x * x).mean()

    def step(filters: Any, picture: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(filters, picture)
        return jax.tree.map(lambda w, g: w - 0.1 * g, filters, gradients), value

    return step, jax.tree.map(jnp.asarray, (filters, picture))


TOYS = {
    "mlp": mlp,
    "wide mlp": partial(mlp, 4, 512, 64),  # parameters of 1 MiB, which `host_state` keeps on the host
    "convolutions": convolutions,
    "unet3d": partial(train.unet3d_step, 16, config=UNet3DConfig(levels=3, filters=4), concrete=True),
    "unet2d": partial(train.unet2d_step, 32, 2, UNet2DConfig(levels=3, filters=4, norm="group"), concrete=True),
    "nnunet3d": partial(train.nnunet3d_step, 16, 1, filters=4, concrete=True),
    "nnunet2d": partial(train.nnunet2d_step, 32, 4, 3, filters=4, concrete=True),
    "resnet": partial(train.resnet_step, 64, 8, 14, ResNetConfig(filters=4, classes=5), concrete=True),
    "googlenet": partial(train.googlenet_step, 64, 8, GoogLeNetConfig(1 / 16, 5, STAGES[:1]), concrete=True),
    "alexnet": partial(train.alexnet_step, 63, 64, AlexNetConfig(1 / 16, 5, dropout=0.1), concrete=True),
    "deeplab": partial(
        train.deeplab_step, 64, 4, 14, DeepLabConfig(filters=4, classes=3, rates=(2,), width=8, shallow=4),
        concrete=True,
    ),
    "decoder": partial(train.decoder_step, 4, 32, 8, 64, DecoderConfig(heads=2, vocab=64), concrete=True),
    "decoder-scan": partial(
        train.decoder_step, 4, 32, 8, 64, DecoderConfig(heads=2, vocab=64, scan=True), concrete=True
    ),
}  # fmt: skip
