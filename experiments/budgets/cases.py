"""The cases: a training step, the GPU it is planned for, and a budget: a share of the plain step's bytes, or bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.train import Built, Step, TrainState, decoder_step, make_step, resnet_step, unet2d_step, unet3d_step
from models.transformer import DecoderConfig
from models.unet3d import UNet3DConfig


@dataclass(frozen=True)
class Program:
    """A training step.

    Attributes:
      name: names files.
      make: the step and its arguments as shapes.
    """

    name: str
    make: Callable[[], Built]


@dataclass(frozen=True)
class Case:
    """A program under a budget.

    Attributes:
      device: name of the GPU (`memplan devices`).
      budget: percents of what the compiler says that the plain step takes there; or bytes, such as "15GiB".
      required: one of the twelve that the figures in README.md stand on.
    """

    program: Program
    device: str
    budget: int | str
    required: bool = False

    @property
    def name(self) -> str:
        return f"{self.program.name}-{self.device}-{self.budget}"


def mlp_step(
    layers: int = 24, width: int = 2048, batch: int = 16384, *, concrete: bool = False, seed: int = 0
) -> Built:
    """Regression by `layers` equal dense layers with ReLU; SGD with momentum. Batch: two (batch, width)."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = batch["x"]
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return jnp.square(x - batch["y"]).mean(), batch_stats

    def arguments(key: jax.Array) -> tuple[TrainState, Any]:
        x, y, *weights = jax.random.split(key, 2 + layers)
        scale = (2 / width) ** 0.5
        params = [
            {"kernel": scale * jax.random.normal(one, (width, width)), "bias": jnp.zeros(width)} for one in weights
        ]
        data = {"x": jax.random.normal(x, (batch, width)), "y": jax.random.normal(y, (batch, width))}
        return TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params)), data

    key = jax.random.key(seed)
    step: Step = make_step(loss, optimizer)
    return step, jax.jit(arguments)(key) if concrete else jax.eval_shape(arguments, key)


BF16, F32 = jnp.bfloat16, jnp.float32


def _unet3d(name: str, size: int, **config: Any) -> Program:
    return Program(name, partial(unet3d_step, size, config=UNet3DConfig(**config)))


def _resnet(name: str, batch: int, depth: int = 50) -> Program:
    return Program(name, partial(resnet_step, batch=batch, depth=depth))


def _decoder(name: str, batch: int, tokens: int, **config: Any) -> Program:
    return Program(name, partial(decoder_step, batch=batch, tokens=tokens, config=DecoderConfig(**config)))


UNET3D_144 = _unet3d("unet3d_144", 144)
UNET3D_96 = _unet3d("unet3d_96_f16", 96, filters=16)
UNET3D_TRANSPOSE = _unet3d("unet3d_96_transpose", 96, filters=16, upsampling="transpose")
UNET3D_BF16 = _unet3d("unet3d_96_bf16", 96, dtype=BF16)
UNET2D = Program("unet2d_256_b8", partial(unet2d_step, 256, batch=8))
RESNET50_64 = _resnet("resnet50_b64", 64)
RESNET50_32 = _resnet("resnet50_b32", 32)
RESNET50_1152 = _resnet("resnet50_b1152", 1152)
RESNET101 = _resnet("resnet101_b16", 16, depth=101)
DECODER_24 = _decoder("decoder_24_bf16", 8, 1024, dtype=BF16)
DECODER_8_F32 = _decoder("decoder_8_f32", 8, 512, layers=8, width=512, heads=8, dtype=F32)
DECODER_8_BF16 = _decoder("decoder_8_bf16", 8, 512, layers=8, width=512, heads=8, dtype=BF16)
DECODER_SCAN = _decoder("decoder_8_scan", 8, 512, layers=8, width=512, heads=8, dtype=F32, scan=True)
MLP_24 = Program("mlp_24", mlp_step)

REQUIRED = tuple(
    Case(program, device, share, required=True)
    for program, device, shares in (
        (UNET3D_144, "v100", (75, 60, 55)),
        (UNET3D_144, "h200", (75, 60, 55)),
        (RESNET50_64, "v100", (75, 50, 30)),
        (DECODER_24, "a100", (75, 50, 35)),
    )
    for share in shares
)
"""The cases that README.md quotes."""

OTHERS = tuple(
    Case(program, device, budget)
    for program, device, budgets in (
        (MLP_24, "b200", (70, 50)),
        (MLP_24, "gh200", (40,)),
        (UNET3D_96, "p100", (70, 50)),
        (UNET3D_96, "a100", (50,)),
        (UNET3D_TRANSPOSE, "a100", (70, 50)),
        (UNET3D_BF16, "h200", (70, 50)),
        (UNET2D, "v100", (70, 50, 40)),
        (UNET2D, "h200", (50,)),
        (DECODER_8_F32, "v100", (70, 50)),
        (DECODER_8_BF16, "h100", (70, 50)),
        (DECODER_SCAN, "a100", (95,)),
        (RESNET50_32, "h100", (70, 40)),
        (RESNET50_32, "p100", (50,)),
        (RESNET101, "rtx4090", (50,)),
        (RESNET50_64, "v100", ("1250MiB",)),
        (RESNET50_1152, "v100", ("15GiB",)),
    )
    for budget in budgets
)
"""Other models, dtypes and devices, so that the planner is not fitted to the cases above; and what `size` asks."""

CASES = {case.name: case for case in (*REQUIRED, *OTHERS)}
