"""GoogLeNet: blocks of parallel convolutions whose results are concatenated.

Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015), table 1, with batch norm after each
convolution (Ioffe and Szegedy, 2015) in place of local response norm. The two auxiliary classifiers
are optional. Their average pool is an adaptive one to 4x4, the size that the paper's windows give
for a 224^2 image, so images may be larger.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.pooling import adaptive_average

Block = tuple[int, int, int, int, int, int]
"""Channels of the 1x1, the 3x3 reduction, the 3x3, the 5x5 reduction, the 5x5, the projection."""

STAGES: tuple[tuple[Block, ...], ...] = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""The blocks between pools: 3a and 3b, 4a to 4e, 5a and 5b."""

AUXILIARY = ((1, 0), (1, 3))
"""Stage and block that feed the auxiliary classifiers: 4a and 4d."""


@dataclass(frozen=True)
class GoogLeNetConfig:
    """Architecture of a GoogLeNet; `width` multiplies every number of channels and hidden units.

    `aux` adds the auxiliary classifiers, whose hidden units are dropped with probability `dropout`
    in training. `dtype` is that of activations; parameters and running statistics are float32.
    `remat` puts `jax.checkpoint` around each block.
    """

    width: float = 1.0
    classes: int = 1000
    stages: tuple[tuple[Block, ...], ...] = STAGES
    dtype: Any = jnp.float32
    aux: bool = False
    dropout: float = 0.7
    remat: bool = False

    def __post_init__(self) -> None:
        blocks = {
            (stage, block) for stage, row in enumerate(self.stages) for block in range(len(row))
        }
        if self.aux and not blocks.issuperset(AUXILIARY):
            raise ValueError(
                "Auxiliary classifiers sit behind blocks 4a and 4d, which `stages` lacks; leave "
                "`aux` off."
            )

    def channels(self, count: int) -> int:
        return max(1, round(self.width * count))


class Conv(nn.Module):
    """Convolution, batch norm, ReLU."""

    config: GoogLeNetConfig
    channels: int
    side: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h / stride, w / stride, channels)."""
        channels, dtype = self.config.channels(self.channels), self.config.dtype
        sides, strides = (self.side, self.side), (self.stride, self.stride)
        x = nn.Conv(channels, sides, strides, use_bias=False, dtype=dtype, name="conv")(x)
        norm = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, dtype=dtype, name="norm")
        return nn.relu(norm(x))


class Inception(nn.Module):
    """1x1, 3x3 and 5x5 convolutions and a pool side by side, concatenated along the channels."""

    config: GoogLeNetConfig
    block: Block

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h, w, sum of the four branches)."""
        point, reduce_three, three, reduce_five, five, project = self.block
        conv = partial(Conv, self.config)
        pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
        branches = (
            conv(point, 1, name="one")(x, train),
            conv(three, 3, name="three")(
                conv(reduce_three, 1, name="reduce_three")(x, train), train
            ),
            conv(five, 5, name="five")(conv(reduce_five, 1, name="reduce_five")(x, train), train),
            conv(project, 1, name="project")(pooled, train),
        )
        return jnp.concatenate(branches, -1)


class Auxiliary(nn.Module):
    """Classifier on an inner block, which adds gradients in training and is unused afterwards."""

    config: GoogLeNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> logits (batch, classes), float32."""
        config = self.config
        x = Conv(config, 128, 1, name="reduce")(adaptive_average(x, (4, 4)), train)
        x = nn.Dense(config.channels(1024), dtype=config.dtype, name="hidden")(
            x.reshape(x.shape[0], -1)
        )
        x = nn.Dropout(config.dropout, deterministic=not train)(nn.relu(x))
        return classify(config, x)


def classify(config: GoogLeNetConfig, x: jax.Array) -> jax.Array:
    """The calling module's layer "head": (batch, any) -> logits (batch, classes), float32."""
    logits = nn.Dense(config.classes, dtype=config.dtype, name="head")(x)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class GoogLeNet(nn.Module):
    """Image classifier, channels last; running statistics are in "batch_stats"."""

    config: GoogLeNetConfig = GoogLeNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array | tuple[jax.Array, ...]:
        """(batch, h, w, 3) -> logits (batch, classes), float32.

        In training with `aux`, returns the logits of three classifiers, the main one first. In
        training, apply with `mutable=["batch_stats"]`, and with `aux` also `rngs={"dropout": key}`.
        """
        config, auxiliary = self.config, []
        pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")
        x = pool(Conv(config, 64, 7, 2, name="stem")(image.astype(config.dtype), train))
        x = Conv(config, 64, 1, name="reduce")(x, train)
        x = pool(Conv(config, 192, 3, name="expand")(x, train))
        inception = nn.remat(Inception, static_argnums=2) if config.remat else Inception
        for stage, blocks in enumerate(config.stages):
            x = pool(x) if stage else x
            for number, block in enumerate(blocks):
                x = inception(config, block, name=f"stage_{stage}_block_{number}")(x, train)
                if config.aux and (stage, number) in AUXILIARY:
                    auxiliary.append(
                        Auxiliary(config, name=f"auxiliary_{len(auxiliary)}")(x, train)
                    )
        logits = classify(config, x.mean((1, 2)))
        return (logits, *auxiliary) if config.aux and train else logits
