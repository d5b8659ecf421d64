"""Whole training steps: forward, loss, gradient and optax update of each model.

Every builder returns `(step, (state, batch))` with `step(state, batch) -> (state, {"loss":
scalar})`. By default the arguments are trees of `jax.ShapeDtypeStruct`, and nothing is allocated.
With `concrete=True` they are an initialised state and a random batch, both from `seed`. A step is
pure and not jitted; use `jax.jit(step, donate_argnums=0)`. Dropout masks depend on `seed` and
`state.step`.

`config` is the model's architecture, and all further keywords are fields of it:
`resnet_step(depth=101, classes=10, dtype="bfloat16")`. Literals suffice, so memplan's command line
can call a builder.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import optax

from models.alexnet import AlexNet, AlexNetConfig
from models.deeplab import DeepLab, DeepLabConfig
from models.googlenet import GoogLeNet, GoogLeNetConfig
from models.losses import (
    auxiliary_cross_entropy,
    cross_entropy,
    deep_supervision_loss,
    dice_cross_entropy,
    soft_dice_loss,
)
from models.nnunet import NNUNet, NNUNetConfig, planned_strides
from models.resnet import ResNet, ResNetConfig
from models.steps import (
    Batch,
    Built,
    Loss,
    Measure,
    Metrics,
    Sample,
    Step,
    TrainState,
    build,
    configured,
    make_random_step,
    make_step,
    plain_loss,
    random_images,
    training_loss,
)
from models.transformer import Decoder, DecoderConfig
from models.unet import UNet
from models.unet2d import UNet2D, UNet2DConfig
from models.unet3d import UNet3D, UNet3DConfig

__all__ = [
    "Batch",
    "Built",
    "Loss",
    "Metrics",
    "Step",
    "TrainState",
    "alexnet_step",
    "cross_entropy",
    "decoder_step",
    "deeplab_step",
    "googlenet_step",
    "make_random_step",
    "make_step",
    "nnunet2d_step",
    "nnunet3d_step",
    "resnet_step",
    "soft_dice_loss",
    "unet2d_step",
    "unet3d_step",
]


def unet3d_step(
    size: int | Sequence[int],
    batch: int = 1,
    config: UNet3DConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """Segmentation of volumes by cross-entropy plus soft Dice; `size` is one side, or three.

    batch: "image" (batch, d, h, w, in_channels) float32, "label" (batch, d, h, w) int32. Default
    optimizer: SGD, learning rate 1e-2, momentum 0.9. ValueError: a side cannot be halved
    `levels - 1` times.
    """
    model = UNet3D(configured(config or UNet3DConfig(), fields))
    return _unet_step(model, size, batch, optimizer, concrete, seed)


def unet2d_step(
    size: int | Sequence[int],
    batch: int = 1,
    config: UNet2DConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """As `unet3d_step`, for images; `size` is one side in pixels, or two."""
    model = UNet2D(configured(config or UNet2DConfig(), fields))
    return _unet_step(model, size, batch, optimizer, concrete, seed)


def nnunet3d_step(
    size: int | Sequence[int] = 128,
    batch: int = 2,
    stages: int | None = None,
    config: NNUNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """As `unet3d_step`, with nnU-Net's network for this size, optionally its first `stages` only.

    The loss is a sum over the outputs with `deep_supervision_weights`. Default optimizer: SGD,
    learning rate 1e-2, Nesterov momentum 0.99, weight decay 3e-5, gradients clipped to a norm of
    12. ValueError: the strides do not divide a side.
    """
    return _nnunet_step(_sides(size, 3), batch, stages, config, fields, optimizer, concrete, seed)


def nnunet2d_step(
    size: int | Sequence[int] = 512,
    batch: int = 12,
    stages: int | None = None,
    config: NNUNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """As `nnunet3d_step`, for images; `size` is one side in pixels, or two."""
    return _nnunet_step(_sides(size, 2), batch, stages, config, fields, optimizer, concrete, seed)


def resnet_step(
    image: int = 224,
    batch: int = 64,
    depth: int | None = None,
    config: ResNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """Classification of square RGB images of side `image` pixels; `depth` overrides the config's.

    batch: "image" (batch, image, image, 3) float32, "label" (batch,) int32. Default optimizer: SGD,
    learning rate 0.1, momentum 0.9. ImageNet-22k has `classes=21841`.
    """
    config = configured(config or ResNetConfig(), fields, depth=depth)
    model, optimizer = ResNet(config), optimizer or optax.sgd(0.1, momentum=0.9)
    step = make_step(training_loss(model, cross_entropy), optimizer)
    return build(model, step, optimizer, _pictures(image, batch, config.classes), concrete, seed)


def googlenet_step(
    image: int = 224,
    batch: int = 64,
    config: GoogLeNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """As `resnet_step`, with a GoogLeNet; `aux=True` adds the auxiliary losses, times 0.3 each."""
    config = configured(config or GoogLeNetConfig(), fields)
    model, optimizer = GoogLeNet(config), optimizer or optax.sgd(0.1, momentum=0.9)
    if config.aux:
        step = _dropout_step(model, auxiliary_cross_entropy, optimizer, seed)
    else:
        step = make_step(training_loss(model, cross_entropy), optimizer)
    return build(model, step, optimizer, _pictures(image, batch, config.classes), concrete, seed)


def alexnet_step(
    image: int = 224,
    batch: int = 128,
    config: AlexNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """As `resnet_step`, with an AlexNet and a default learning rate of 0.01."""
    config = configured(config or AlexNetConfig(), fields)
    model, optimizer = AlexNet(config), optimizer or optax.sgd(0.01, momentum=0.9)
    step = _dropout_step(model, cross_entropy, optimizer, seed)
    return build(model, step, optimizer, _pictures(image, batch, config.classes), concrete, seed)


def deeplab_step(
    image: int = 513,
    batch: int = 16,
    depth: int | None = None,
    config: DeepLabConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """Segmentation of square RGB images of side `image` by cross-entropy; `depth` is the ResNet's.

    batch: "image" (batch, image, image, 3) float32, "label" (batch, image, image) int32. Default
    optimizer: SGD, learning rate 7e-3, momentum 0.9.
    """
    config = configured(config or DeepLabConfig(), fields, depth=depth)
    model, optimizer = DeepLab(config), optimizer or optax.sgd(7e-3, momentum=0.9)
    step = make_step(training_loss(model, cross_entropy), optimizer)
    sample = random_images((batch, image, image, 3), (batch, image, image), config.classes)
    return build(model, step, optimizer, sample, concrete, seed)


def decoder_step(
    layers: int | None = None,
    width: int | None = None,
    batch: int = 8,
    tokens: int = 1024,
    config: DecoderConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Built:
    """Next-token prediction on sequences of `tokens`; `layers` and `width` override the config's.

    batch: "tokens" and "targets", both (batch, tokens) int32, the second shifted by one. Default
    optimizer: AdamW, learning rate 3e-4. ValueError: `tokens` exceeds the config's context.
    """
    config = configured(config or DecoderConfig(), fields, layers=layers, width=width)
    model, optimizer = Decoder(config), optimizer or optax.adamw(3e-4)

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["tokens"])
        assert isinstance(logits, jax.Array)
        return cross_entropy(logits, batch["targets"]), batch_stats

    def sample(key: jax.Array) -> Batch:
        text = jax.random.randint(key, (batch, tokens + 1), 0, config.vocab)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return build(
        model, make_step(loss, optimizer), optimizer, sample, concrete, seed, inputs="tokens"
    )


def _unet_step(
    model: UNet,
    size: int | Sequence[int],
    batch: int,
    optimizer: optax.GradientTransformation | None,
    concrete: bool,
    seed: int,
) -> Built:
    config, sides = model.config, _sides(size, model.rank)
    config.check_size(sides)
    optimizer = optimizer or optax.sgd(1e-2, momentum=0.9)
    step = make_step(plain_loss(model, dice_cross_entropy), optimizer)
    sample = random_images((batch, *sides, config.in_channels), (batch, *sides), config.classes)
    return build(model, step, optimizer, sample, concrete, seed)


def _nnunet_step(
    sides: tuple[int, ...],
    batch: int,
    stages: int | None,
    config: NNUNetConfig | None,
    fields: dict[str, Any],
    optimizer: optax.GradientTransformation | None,
    concrete: bool,
    seed: int,
) -> Built:
    config = configured(config or NNUNetConfig(planned_strides(sides)), fields)
    config = configured(config, {"strides": config.strides[:stages]})
    config.check_size(sides)
    model, optimizer = NNUNet(config), optimizer or _nnunet_sgd()
    step = make_step(plain_loss(model, deep_supervision_loss), optimizer)
    sample = random_images((batch, *sides, config.in_channels), (batch, *sides), config.classes)
    return build(model, step, optimizer, sample, concrete, seed)


def _nnunet_sgd() -> optax.GradientTransformation:
    descend = optax.sgd(1e-2, momentum=0.99, nesterov=True)
    return optax.chain(optax.clip_by_global_norm(12.0), optax.add_decayed_weights(3e-5), descend)


def _dropout_step(
    model: Any, measure: Measure, optimizer: optax.GradientTransformation, seed: int
) -> Step:
    return make_random_step(partial(training_loss, model, measure), optimizer, seed)


def _pictures(image: int, batch: int, classes: int) -> Sample:
    return random_images((batch, image, image, 3), (batch,), classes)


def _sides(size: int | Sequence[int], rank: int) -> tuple[int, ...]:
    sides = (size,) * rank if isinstance(size, int) else tuple(size)
    if len(sides) != rank:
        raise ValueError(f"The size is one side or {rank}, not {len(sides)}: {sides}.")
    return sides
