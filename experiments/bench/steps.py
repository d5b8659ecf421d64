"""Training steps to measure: realistic ones as shapes, and small ones with arrays for the CPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from memplan.parallel.step import data_parallel
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
    layers: int = 24,
    width: int = 2048,
    batch: int = 16384,
    *,
    concrete: bool = False,
    seed: int = 0,
) -> train.Built:
    """Regression by `layers` dense ReLU layers; SGD with momentum. Batch: two (batch, width)."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = batch["x"]
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return jnp.square(x - batch["y"]).mean(), batch_stats

    def arguments(key: jax.Array) -> tuple[train.TrainState, Any]:
        x, y, *weights = jax.random.split(key, 2 + layers)
        scale = (2 / width) ** 0.5
        kernels = (scale * jax.random.normal(weight_key, (width, width)) for weight_key in weights)
        params = [{"kernel": kernel, "bias": jnp.zeros(width)} for kernel in kernels]
        data = {
            "x": jax.random.normal(x, (batch, width)),
            "y": jax.random.normal(y, (batch, width)),
        }
        return train.TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params)), data

    key = jax.random.key(seed)
    step: train.Step = train.make_step(loss, optimizer)
    return step, jax.jit(arguments)(key) if concrete else jax.eval_shape(arguments, key)


def unet3d(size: int, **config: Any) -> Callable[[], train.Built]:
    return partial(train.unet3d_step, size, config=UNet3DConfig(**config))


def spread_unet3d(
    size: int, hosts: int, per_host: int, host: int | str, device: int | str
) -> train.Built:
    """A U-Net for one volume; hosts split one dimension, the devices of a host another."""
    step, args = unet3d(size)()
    mesh = AbstractMesh((hosts, per_host), ("host", "device"))
    return data_parallel(step, mesh, space={"host": host, "device": device}), args


def least_halo_bytes(size: int, parts: Sequence[int], config: UNet3DConfig = UNet3DConfig()) -> int:
    """The fewest halo bytes that an inner device sends in a step, given the parts along each side.

    These are the rims of each 3-convolution's input, and of the gradient of its output. The image
    needs no gradient.
    """
    nbytes = 0
    for level in range(config.levels):
        width, sides = config.filters << level, [(size >> level) // part for part in parts]
        down = (width // 2 + width if level else config.in_channels, width + width)
        # Nearest-neighbour upsampling keeps the channels.
        up = (3 * width + width, width + width) if level + 1 < config.levels else ()
        rim = prod(side + 2 * (part > 1) for side, part in zip(sides, parts, strict=True)) - prod(
            sides
        )
        nbytes += 4 * rim * sum((*down, *up))
    return nbytes


def resnet(batch: int, depth: int = 50, **options: Any) -> Callable[[], train.Built]:
    return partial(train.resnet_step, batch=batch, depth=depth, **options)


def decoder(batch: int, tokens: int, **config: Any) -> Callable[[], train.Built]:
    return partial(train.decoder_step, batch=batch, tokens=tokens, config=DecoderConfig(**config))


_TENSOR = {  # Dimension of a parameter to split inside a host, as Megatron-LM (arXiv:1909.08053).
    "query": -2, "key": -2, "value": -2, "output": 0, "mlp_in": -1, "mlp_out": 0, "embedding": 0,
}  # fmt: skip


def _tensor_dim(names: Sequence[str], rank: int) -> int | None:
    """The dimension of a parameter to split inside a host; None: replicate it."""
    dim = next((_TENSOR[name] for name in names if name in _TENSOR), None)
    if dim is None or names[-1] != "bias":
        return dim
    if dim not in (-1, -2):  # the bias after a split contraction
        return None
    return -2 if rank == 2 else -1


def sharded_decoder(
    kind: str, layers: int, hosts: int, per_host: int, checkpoint: str = ""
) -> train.Built:
    """A decoder with four sequences of 1,024 tokens for every part of the batch.

    kind: "fsdp" splits parameters, optimizer state and batch over all devices; "tensor" splits
    parameters inside a host and the batch over hosts; "both" also splits parameters over hosts.
    """
    mesh = AbstractMesh((hosts, per_host), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    every = ("host", "device") if kind == "fsdp" else ("host",)
    config = DecoderConfig(layers=layers, checkpoint=checkpoint)
    parts = prod(mesh.shape[axis] for axis in every)
    step, (state, batch) = train.decoder_step(batch=4 * parts, tokens=1024, config=config)

    def placed(path: Any, leaf: Any) -> Any:
        names, shape = [str(getattr(key, "key", "")) for key in path], leaf.shape
        spec: list[Any] = [None] * len(shape)
        if kind != "fsdp" and (dim := _tensor_dim(names, len(shape))) is not None:
            spec[dim] = "device"
        free = [axis for axis, size in enumerate(shape) if spec[axis] is None and not size % parts]
        if kind != "tensor" and free and leaf.size >= 2**16:
            spec[max(free, key=lambda axis: shape[axis])] = every
        return jax.ShapeDtypeStruct(
            shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    state = jax.tree_util.tree_map_with_path(placed, state)
    rows = NamedSharding(mesh, PartitionSpec(every))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch
    )

    def kept(state: Any, batch: Any) -> Any:
        """Keep the sharding of the state."""
        new, metrics = step(state, batch)
        return jax.lax.with_sharding_constraint(new, shardings), metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return kept, (state, batch)


DECODER_24: Mapping[str, Any] = {"batch": 8, "tokens": 1024}
DECODER_8: Mapping[str, Any] = {"batch": 8, "tokens": 512, "layers": 8, "width": 512, "heads": 8}

_SMALL_RESNET = ResNetConfig(depth=26, filters=16, classes=10)
_STAGES = ((), ((8, 8, 8, 8, 8, 8),) * 2)
_SMALL_DECODER = partial(DecoderConfig, layers=3, width=32, heads=4, vocab=128, context=64)


def small_resnet() -> train.Built:
    """ResNet-26 on 32 images of 64^2: compiles in seconds, has more activations than state."""
    return train.resnet_step(64, 32, config=_SMALL_RESNET, concrete=True)


def _small_unet3d(**config: Any) -> train.Built:
    return train.unet3d_step(32, config=UNet3DConfig(filters=8, levels=3, **config), concrete=True)


def _small_decoder(**config: Any) -> train.Built:
    return train.decoder_step(batch=4, tokens=64, config=_SMALL_DECODER(**config), concrete=True)


SMALL: Mapping[str, Callable[[], train.Built]] = {
    "alexnet": lambda: train.alexnet_step(
        95, 32, AlexNetConfig(width=1 / 16, classes=10), concrete=True
    ),
    "googlenet": lambda: train.googlenet_step(
        64, 8, GoogLeNetConfig(width=1 / 4, classes=10, stages=_STAGES, aux=False), concrete=True
    ),
    "resnet": lambda: train.resnet_step(64, 4, depth=14, filters=8, classes=10, concrete=True),
    "resnet_deep": lambda: train.resnet_step(
        32, 4, config=ResNetConfig(depth=26, filters=8, classes=10), concrete=True
    ),
    "deeplab": lambda: train.deeplab_step(
        65,
        2,
        config=DeepLabConfig(depth=14, filters=8, classes=5, width=16, shallow=8),
        concrete=True,
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
"""Every model with arrays, at a size that a CPU steps in seconds."""


GROWING: Mapping[str, Callable[..., train.Built]] = {
    "alexnet-batch": lambda size: train.alexnet_step(95, size, width=1 / 32, classes=5),
    "googlenet-batch": lambda size: train.googlenet_step(
        32, size, width=1 / 2, classes=5, stages=_STAGES
    ),
    "resnet14-size": lambda size: train.resnet_step(size, 4, depth=14, filters=8, classes=10),
    "unet2d-size": lambda size: train.unet2d_step(size, levels=3, filters=4),
    "unet3d-size": lambda size: train.unet3d_step(size, levels=2, filters=4),
    "decoder-batch": lambda size: train.decoder_step(2, 64, tokens=64, vocab=256, batch=size),
}  # fmt: skip
"""Small networks of variable size."""
