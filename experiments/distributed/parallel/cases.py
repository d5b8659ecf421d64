"""Small training steps with what sets each apart: instance norm, batch norm over the global batch, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from models.resnet import ResNetConfig
from models.train import Built, decoder_step, resnet_step, unet2d_step
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig

BATCH = 8


def unet() -> Built:
    return unet2d_step(16, BATCH, UNet2DConfig(levels=2, filters=8), concrete=True)


def resnet() -> Built:
    config = ResNetConfig(depth=14, filters=8, classes=10)
    return resnet_step(32, BATCH, config=config, optimizer=optax.sgd(0.01, momentum=0.9), concrete=True)


def decoder() -> Built:
    config = DecoderConfig(vocab=64, context=16, heads=2)
    return decoder_step(2, 32, BATCH, 16, config=config, concrete=True)


CASES: dict[str, Callable[[], Built]] = {"unet": unet, "resnet": resnet, "decoder": decoder}


def trained(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> tuple[Any, list[float]]:
    """The state after so many steps on one batch, and the losses."""
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses
