"""Training steps to measure: sizes that people train, as shapes, and small ones with arrays for the CPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models import train
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import GoogLeNetConfig
from models.resnet import ResNetConfig
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig

BF16, F32 = jnp.bfloat16, jnp.float32


def mlp_step(
    layers: int = 24, width: int = 2048, batch: int = 16384, *, concrete: bool = False, seed: int = 0
) -> train.Built:
    """Regression by `layers` equal dense layers with ReLU; SGD with momentum. Batch: two (batch, width)."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = batch["x"]
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return jnp.square(x - batch["y"]).mean(), batch_stats

    def arguments(key: jax.Array) -> tuple[train.TrainState, Any]:
        x, y, *weights = jax.random.split(key, 2 + layers)
        scale = (2 / width) ** 0.5
        kernels = (scale * jax.random.normal(one, (width, width)) for one in weights)
        params = [{"kernel": kernel, "bias": jnp.zeros(width)} for kernel in kernels]
        data = {"x": jax.random.normal(x, (batch, width)), "y": jax.random.normal(y, (batch, width))}
        return train.TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params)), data

    key = jax.random.key(seed)
    step: train.Step = train.make_step(loss, optimizer)
    return step, jax.jit(arguments)(key) if concrete else jax.eval_shape(arguments, key)


def unet3d(size: int, **config: Any) -> Callable[[], train.Built]:
    return partial(train.unet3d_step, size, config=UNet3DConfig(**config))


def resnet(batch: int, depth: int = 50, **options: Any) -> Callable[[], train.Built]:
    return partial(train.resnet_step, batch=batch, depth=depth, **options)


def decoder(batch: int, tokens: int, **config: Any) -> Callable[[], train.Built]:
    return partial(train.decoder_step, batch=batch, tokens=tokens, config=DecoderConfig(**config))


DECODER_24: Mapping[str, Any] = {"batch": 8, "tokens": 1024}
DECODER_8: Mapping[str, Any] = {"batch": 8, "tokens": 512, "layers": 8, "width": 512, "heads": 8}

_SMALL_RESNET = ResNetConfig(depth=26, filters=16, classes=10)
_STAGES = ((), ((8, 8, 8, 8, 8, 8),) * 2)
_SMALL_DECODER = partial(DecoderConfig, layers=3, width=32, heads=4, vocab=128, context=64)


def small_resnet() -> train.Built:
    """Compiled in seconds, with activations that outweigh its state: ResNet-26 on 32 images of 64^2."""
    return train.resnet_step(64, 32, config=_SMALL_RESNET, concrete=True)


def _small_unet3d(**config: Any) -> train.Built:
    return train.unet3d_step(32, config=UNet3DConfig(filters=8, levels=3, **config), concrete=True)


def _small_decoder(**config: Any) -> train.Built:
    return train.decoder_step(batch=4, tokens=64, config=_SMALL_DECODER(**config), concrete=True)


SMALL: Mapping[str, Callable[[], train.Built]] = {
    "alexnet": lambda: train.alexnet_step(95, 32, AlexNetConfig(width=1 / 16, classes=10), concrete=True),
    "googlenet": lambda: train.googlenet_step(
        64, 8, GoogLeNetConfig(width=1 / 4, classes=10, stages=_STAGES, aux=False), concrete=True
    ),
    "resnet": lambda: train.resnet_step(64, 4, depth=14, filters=8, classes=10, concrete=True),
    "resnet_deep": lambda: train.resnet_step(
        32, 4, config=ResNetConfig(depth=26, filters=8, classes=10), concrete=True
    ),
    "deeplab": lambda: train.deeplab_step(
        65, 2, config=DeepLabConfig(depth=14, filters=8, classes=5, width=16, shallow=8), concrete=True
    ),
    "unet2d": lambda: train.unet2d_step(64, 2, UNet2DConfig(filters=8), concrete=True),
    "unet3d": _small_unet3d,
    "unet3d_bf16": partial(_small_unet3d, dtype=BF16),
    "unet3d_transpose": partial(_small_unet3d, upsampling="transpose"),
    "nnunet2d": lambda: train.nnunet2d_step(64, 2, filters=8, concrete=True),
    "nnunet3d": lambda: train.nnunet3d_step(32, 1, filters=8, concrete=True),
    "decoder": _small_decoder,
    "decoder_bf16": partial(_small_decoder, dtype=BF16),
    "decoder_scan": partial(_small_decoder, scan=True),
}
"""Every model with arrays, stepped by a CPU in seconds."""


GROWING: Mapping[str, Callable[..., train.Built]] = {
    "alexnet-batch": lambda size: train.alexnet_step(95, size, width=1 / 32, classes=5),
    "googlenet-batch": lambda size: train.googlenet_step(32, size, width=1 / 2, classes=5, stages=_STAGES),
    "resnet14-size": lambda size: train.resnet_step(size, 4, depth=14, filters=8, classes=10),
    "unet2d-size": lambda size: train.unet2d_step(size, levels=3, filters=4),
    "unet3d-size": lambda size: train.unet3d_step(size, levels=2, filters=4),
    "decoder-batch": lambda size: train.decoder_step(2, 64, tokens=64, vocab=256, batch=size),
}  # fmt: skip
"""Small networks by a size."""
