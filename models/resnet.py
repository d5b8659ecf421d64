"""ResNet-50/101/152 with bottleneck blocks.

He et al., "Deep Residual Learning" (CVPR 2016), in the "v1.5" form in which the 3x3 convolution of a block carries the
stride (Gross and Wilber, 2016). Convolutions and the first pool are padded as by TensorFlow's "SAME". The last norm of
each block starts at zero (Goyal et al., 2017).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Depth to blocks per stage; 14 and 26 are the customary small variants."""

EXPANSION = 4
"""Channels leaving a bottleneck block, per channel inside it."""


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture of a ResNet.

    Stage `i` works with `filters * 2**i` channels inside its blocks and 4 times that between them.
    `dtype` is that of activations; parameters and running statistics are float32.
    """

    depth: int = 50
    filters: int = 64
    classes: int = 1000
    dtype: Any = jnp.float32

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks per stage."""
        if self.depth not in BLOCKS:
            raise ValueError(f"No ResNet of depth {self.depth}; choose one of {sorted(BLOCKS)}.")
        return BLOCKS[self.depth]


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3 (strided), 1x1 expand, plus the shortcut, projected where shapes differ."""

    config: ResNetConfig
    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h / stride, w / stride, 4 * filters)."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.config.dtype)
        norm = partial(batch_norm, self.config, train)
        wide, strides = self.filters * EXPANSION, (self.stride, self.stride)
        y = nn.relu(norm("norm_reduce")(conv(self.filters, (1, 1), name="reduce")(x)))
        y = conv(self.filters, (3, 3), strides, name="spatial")(y)
        y = nn.relu(norm("norm_spatial")(y))
        y = norm("norm_expand", scale_init=nn.initializers.zeros)(conv(wide, (1, 1), name="expand")(y))
        if x.shape != y.shape:
            x = norm("norm_shortcut")(conv(wide, (1, 1), strides, name="shortcut")(x))
        return nn.relu(x + y)


def batch_norm(config: ResNetConfig, train: bool, name: str, **options: Any) -> nn.BatchNorm:
    """Batch norm over batch statistics in training and running ones in evaluation; statistics in float32."""
    return nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, dtype=config.dtype, name=name, **options)


class ResNet(nn.Module):
    """Image classifier, channels last. Running statistics live in the collection "batch_stats"."""

    config: ResNetConfig = ResNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """(batch, h, w, 3) -> logits (batch, classes), float32. In training, apply with `mutable=["batch_stats"]`."""
        config = self.config
        x = image.astype(config.dtype)
        x = nn.Conv(config.filters, (7, 7), (2, 2), use_bias=False, dtype=config.dtype, name="stem")(x)
        x = nn.relu(batch_norm(config, train, "norm_stem")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(config.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(config, config.filters * 2**stage, stride, name=f"stage_{stage}_block_{block}")(x, train)
        logits = nn.Dense(config.classes, dtype=config.dtype, name="head")(x.mean((1, 2)))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
