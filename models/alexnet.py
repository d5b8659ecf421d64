"""AlexNet: five convolutions and three dense layers, two of them after dropout.

Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (NeurIPS 2012),
in the one-column form of Krizhevsky, "One weird trick for parallelizing convolutional neural
networks" (2014), without local response norm. An adaptive pool of 6x6 bins before the dense layers
allows larger images.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.pooling import adaptive_average

BINS = (6, 6)
"""Size of the last feature map of a 224^2 image."""

SMALLEST = 63
"""Fewest pixels along an axis that leave one after the last pool."""


@dataclass(frozen=True)
class AlexNetConfig:
    """Architecture of an AlexNet; `width` multiplies every number of channels and hidden units.

    `dropout` is the probability that training zeroes a hidden unit.
    `dtype` is that of activations; parameters are float32.
    """

    width: float = 1.0
    classes: int = 1000
    dropout: float = 0.5
    dtype: Any = jnp.float32

    def channels(self, count: int) -> int:
        return max(1, round(self.width * count))


class AlexNet(nn.Module):
    """Image classifier, channels last."""

    config: AlexNetConfig = AlexNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """(batch, h, w, 3) -> logits (batch, classes), float32.

        In training, apply with `rngs={"dropout": key}`. ValueError: an image is smaller than
        `SMALLEST`.
        """
        if min(image.shape[1:3]) < SMALLEST:
            raise ValueError(
                f"AlexNet needs images of {SMALLEST} pixels a side or more; got {image.shape[1:3]}."
            )
        pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
        x = pool(self._conv("conv_1", image.astype(self.config.dtype), 64, 11, stride=4, padding=2))
        x = pool(self._conv("conv_2", x, 192, 5))
        x = self._conv("conv_3", x, 384, 3)
        x = self._conv("conv_4", x, 256, 3)
        x = pool(self._conv("conv_5", x, 256, 3))
        x = adaptive_average(x, BINS).reshape(x.shape[0], -1)
        for name in ("dense_1", "dense_2"):
            x = nn.Dropout(self.config.dropout, deterministic=not train)(x)
            x = nn.relu(nn.Dense(self.config.channels(4096), dtype=self.config.dtype, name=name)(x))
        logits = nn.Dense(self.config.classes, dtype=self.config.dtype, name="head")(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _conv(
        self,
        name: str,
        x: jax.Array,
        channels: int,
        side: int,
        stride: int = 1,
        padding: int | None = None,
    ) -> jax.Array:
        """Convolution and ReLU, by default padded to the same size."""
        padding = side // 2 if padding is None else padding
        sides, strides, channels = (side, side), (stride, stride), self.config.channels(channels)
        return nn.relu(
            nn.Conv(channels, sides, strides, padding, dtype=self.config.dtype, name=name)(x)
        )
