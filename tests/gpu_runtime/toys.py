"""Training steps small enough for interpreted kernels, and a device on which it pays to move what they keep."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.hardware.measured import MeasuredDevice
from memplan.xla.local import local_device
from models import train
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import STAGES, GoogLeNetConfig
from models.resnet import ResNetConfig
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig
from tests.within import WITHIN


def fast_link() -> str:
    """A file that says of this device that its copies take no time: at toy size recomputing beats any real link."""
    real_device = local_device()
    device = replace(
        real_device,
        name=f"{real_device.name}-measured",
        link=replace(real_device.link, bandwidth=1e15, latency_s=1e-9),
    )
    path = Path(os.environ["STAND_IN_LOG"]).with_name("device.json")
    MeasuredDevice(device, "gpu", jax.devices()[0].device_kind).save(path)
    return str(path)


def descent(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step of gradient descent: (params, batch) -> (params, loss)."""

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step


def mlp(layers: int = 6, width: int = 64, rows: int = 4096) -> tuple[Any, Any]:
    """Tanh layers and a mean square."""
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((width, width)).astype(np.float32) / 8 for _ in range(layers)]
    batch = draw.standard_normal((rows, width)).astype(np.float32)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    return descent(loss), (params, batch)


def within(name: str) -> tuple[Any, Any]:
    """The step of `mlp` in a block."""
    step, args = mlp()
    return WITHIN[name](step), args


def normalized(side: int = 96, layers: int = 3, channels: int = 8) -> tuple[Any, Any]:
    """Convolutions of a picture, each normalized over all of it: no loop over slabs goes past such a norm."""
    draw = np.random.default_rng(0)
    filters = [
        draw.standard_normal((3, 3, channels, channels)).astype(np.float32) / 8
        for _ in range(layers)
    ]
    picture = draw.standard_normal((1, side, side, channels)).astype(np.float32)

    def loss(filters: Any, x: Any) -> Any:
        for w in filters:
            x = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            centered = x - x.mean((1, 2), keepdims=True)
            x = jnp.tanh(
                centered * jax.lax.rsqrt((centered * centered).mean((1, 2), keepdims=True) + 1e-5)
            )
        return (x * x).mean()

    return descent(loss), (filters, picture)


def drawn_on_cpu(
    builder: Callable[..., Any], *args: Any, **fields: Any
) -> Callable[[], tuple[Any, Any]]:
    """A builder of models.train with concrete arguments, which no kernels of the GPU have to draw."""

    def build() -> tuple[Any, Any]:
        with jax.default_device(jax.devices("cpu")[0]):
            step, args_of_step = builder(*args, **fields, concrete=True)
        return step, jax.tree.map(np.asarray, args_of_step)

    return build


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "unet3d": drawn_on_cpu(train.unet3d_step, 16, config=UNet3DConfig(levels=3, filters=4)),
    "unet2d": drawn_on_cpu(
        train.unet2d_step, 32, 2, UNet2DConfig(levels=3, filters=4, norm="group")
    ),
    "nnunet3d": drawn_on_cpu(train.nnunet3d_step, 16, 1, 2, filters=4),
    "nnunet2d": drawn_on_cpu(train.nnunet2d_step, 32, 4, 3, filters=4),
    "resnet": drawn_on_cpu(train.resnet_step, 64, 8, 14, ResNetConfig(filters=4, classes=5)),
    "googlenet": drawn_on_cpu(train.googlenet_step, 64, 8, GoogLeNetConfig(1 / 16, 5, STAGES[:1])),
    "alexnet": drawn_on_cpu(train.alexnet_step, 63, 64, AlexNetConfig(1 / 16, 5, dropout=0.1)),
    "deeplab": drawn_on_cpu(
        train.deeplab_step,
        64,
        4,
        14,
        DeepLabConfig(filters=4, classes=3, rates=(2,), width=8, shallow=4),
    ),
    "decoder": drawn_on_cpu(train.decoder_step, 6, 32, 8, 64, DecoderConfig(heads=2, vocab=16)),
    "decoder-bfloat16": drawn_on_cpu(
        train.decoder_step, 6, 32, 8, 64, DecoderConfig(heads=2, vocab=16, dtype="bfloat16")
    ),
    "decoder-scan": drawn_on_cpu(
        train.decoder_step, 4, 32, 8, 64, DecoderConfig(heads=2, vocab=64, scan=True)
    ),
}

TOYS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": mlp,
    # parameters of 1 MiB, which `host_state` keeps on the host
    "wide mlp": partial(mlp, 8, 512, 64),
    **{name: partial(within, name) for name in WITHIN},
    "normalized": normalized,
    **MODELS,
}
