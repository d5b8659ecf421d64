"""Whole training steps: forward, loss, gradient and optax update of each model.

Every builder returns `(step, (state, batch))` with `step(state, batch) -> (state, {"loss": scalar})`. By default the
arguments are `jax.ShapeDtypeStruct` trees and nothing is allocated; `concrete=True` gives an initialised state and a
random batch of the right kind, both from `seed`. A step is pure and not yet jitted: `jax.jit(step, donate_argnums=0)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.googlenet import GoogLeNet, GoogLeNetConfig
from models.resnet import ResNet, ResNetConfig
from models.transformer import Decoder, DecoderConfig
from models.unet import UNet
from models.unet2d import UNet2D, UNet2DConfig
from models.unet3d import UNet3D, UNet3DConfig

Batch = dict[str, Any]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes. `step` is an int32 scalar; `batch_stats` is empty for models without running statistics."""

    step: Any
    params: Any
    batch_stats: Any
    opt_state: Any


Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Built = tuple[Step, tuple[TrainState, Batch]]
Loss = Callable[[Any, Any, Batch], tuple[jax.Array, Any]]
"""(params, batch_stats, batch) -> (scalar loss, new batch_stats)."""


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy in nats of logits (..., classes) against integer labels (...).

    By one-hot product: the gradient of picking by index would be a scatter.
    """
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -(one_hot * jax.nn.log_softmax(logits)).sum(-1).mean()


def soft_dice_loss(logits: jax.Array, labels: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """One minus the soft Dice overlap (Milletari et al., 2016), meaned over classes, in [0, 1].

    logits (batch, *spatial, classes), integer labels (batch, *spatial); overlaps are summed over batch and space.
    """
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    axes = tuple(range(logits.ndim - 1))
    shares = jax.nn.softmax(logits)
    overlap = (shares * one_hot).sum(axes)
    total = shares.sum(axes) + one_hot.sum(axes)
    return 1 - ((2 * overlap + epsilon) / (total + epsilon)).mean()


def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> Step:
    """The step that descends `loss` once with `optimizer`."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, batch_stats), gradient = grad(state.params, state.batch_stats, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, batch_stats, opt_state), {"loss": value}

    return step


def unet3d_step(
    size: int | Sequence[int],
    batch: int = 1,
    config: UNet3DConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
) -> Built:
    """Segmentation of volumes of `size` voxels (one side of a cube, or three) by cross-entropy plus soft Dice.

    batch: "image" (batch, d, h, w, in_channels) float32, "label" (batch, d, h, w) int32. Default optimizer: SGD,
    learning rate 1e-2, momentum 0.9. Raises ValueError where a side cannot be halved `levels - 1` times.
    """
    return _segmentation_step(UNet3D(config or UNet3DConfig()), size, batch, optimizer, concrete, seed)


def unet2d_step(
    size: int | Sequence[int],
    batch: int = 1,
    config: UNet2DConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
) -> Built:
    """As `unet3d_step`, for images of `size` pixels (one side of a square, or two)."""
    return _segmentation_step(UNet2D(config or UNet2DConfig()), size, batch, optimizer, concrete, seed)


def resnet_step(
    image: int = 224,
    batch: int = 64,
    depth: int | None = None,
    config: ResNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
) -> Built:
    """Classification of square RGB images of side `image` pixels; `depth`, where given, overrides the config's.

    batch: "image" (batch, image, image, 3) float32, "label" (batch,) int32. Default optimizer: SGD, learning rate 0.1,
    momentum 0.9.
    """
    config = config or ResNetConfig()
    config = config if depth is None else replace(config, depth=depth)
    return _classification_step(ResNet(config), config.classes, image, batch, optimizer, concrete, seed)


def googlenet_step(
    image: int = 224,
    batch: int = 64,
    config: GoogLeNetConfig | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    concrete: bool = False,
    seed: int = 0,
) -> Built:
    """As `resnet_step`, with a GoogLeNet."""
    config = config or GoogLeNetConfig()
    return _classification_step(GoogLeNet(config), config.classes, image, batch, optimizer, concrete, seed)


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
) -> Built:
    """Next-token prediction over sequences of `tokens`; `layers` and `width`, where given, override the config's.

    batch: "tokens" and "targets", both (batch, tokens) int32, the second being the first moved on by one. Default
    optimizer: AdamW, learning rate 3e-4. Raises ValueError for more tokens than the config's context.
    """
    config = config or DecoderConfig()
    config = replace(config, layers=layers or config.layers, width=width or config.width)
    model = Decoder(config)

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["tokens"])
        assert isinstance(logits, jax.Array)
        return cross_entropy(logits, batch["targets"]), batch_stats

    def sample(key: jax.Array) -> Batch:
        text = jax.random.randint(key, (batch, tokens + 1), 0, config.vocab)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return _build(model, "tokens", loss, sample, optimizer or optax.adamw(3e-4), concrete, seed)


def _classification_step(
    model: ResNet | GoogLeNet,
    classes: int,
    image: int,
    batch: int,
    optimizer: optax.GradientTransformation | None,
    concrete: bool,
    seed: int,
) -> Built:
    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), changed["batch_stats"]

    def sample(key: jax.Array) -> Batch:
        pixels, labels = jax.random.split(key)
        return {
            "image": jax.random.normal(pixels, (batch, image, image, 3)),
            "label": jax.random.randint(labels, (batch,), 0, classes),
        }

    return _build(model, "image", loss, sample, optimizer or optax.sgd(0.1, momentum=0.9), concrete, seed)


def _segmentation_step(
    model: UNet,
    size: int | Sequence[int],
    batch: int,
    optimizer: optax.GradientTransformation | None,
    concrete: bool,
    seed: int,
) -> Built:
    config = model.config
    sides = (size,) * model.rank if isinstance(size, int) else tuple(size)
    config.check_size(sides)

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["image"])
        assert isinstance(logits, jax.Array)
        return cross_entropy(logits, batch["label"]) + soft_dice_loss(logits, batch["label"]), batch_stats

    def sample(key: jax.Array) -> Batch:
        voxels, labels = jax.random.split(key)
        return {
            "image": jax.random.normal(voxels, (batch, *sides, config.in_channels)),
            "label": jax.random.randint(labels, (batch, *sides), 0, config.classes),
        }

    return _build(model, "image", loss, sample, optimizer or optax.sgd(1e-2, momentum=0.9), concrete, seed)


def _build(
    model: Any,
    inputs: str,
    loss: Loss,
    sample: Callable[[jax.Array], Batch],
    optimizer: optax.GradientTransformation,
    concrete: bool,
    seed: int,
) -> Built:
    """`inputs` names the entry of a batch that initialises the model."""

    def arguments(key: jax.Array) -> tuple[TrainState, Batch]:
        weights, data = jax.random.split(key)
        batch = sample(data)
        variables = model.init(weights, batch[inputs])
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, optimizer.init(params)), batch

    key, step = jax.random.key(seed), make_step(loss, optimizer)
    return step, _compile_quickly(arguments)(key) if concrete else jax.eval_shape(arguments, key)


def _compile_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit for a function that runs once: random draws take the optimizing compiler far longer than they take to run."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
