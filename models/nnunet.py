"""The U-Net that nnU-Net configures for an image size, with an output at each decoder stage.

Isensee et al., "nnU-Net" (Nature Methods 2021): the plain convolutional network of its second
version for isotropic voxels, in two or three dimensions. It has strided convolutions on the way
down, transposed ones on the way up, and instance norm and leaky ReLU after each convolution, which
has a bias.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.unet import InstanceNorm

Strides = tuple[tuple[int, ...], ...]
"""Strides per stage, finest first, and axis."""

CAPS = {2: 512, 3: 320}
"""Most channels of a stage, by the number of spatial axes."""

SLOPE = 0.01
"""Slope of the leaky ReLU below zero."""


def planned_strides(size: Sequence[int], edge: int = 4) -> Strides:
    """nnU-Net's stages for an image of `size`: each axis is halved while at least `edge` remain.

    If only one axis is still large enough, it is halved from three times `edge` on.
    """
    strides, size = [(1,) * len(size)], tuple(size)
    while True:
        halved = [extent >= 2 * edge for extent in size]
        if not any(halved) or (sum(halved) == 1 and max(size) < 3 * edge):
            return tuple(strides)
        strides.append(tuple(1 + half for half in halved))
        size = tuple(
            math.ceil(extent / step) for extent, step in zip(size, strides[-1], strict=True)
        )


@dataclass(frozen=True)
class NNUNetConfig:
    """Architecture of an nnU-Net; `strides` decides the number of stages and of spatial axes.

    Stage `i` has `filters * 2**i` channels, at most `cap` (default: 320 in three dimensions, 512 in
    two), and two 3-convolutions each on the way down and up. `dtype` is that of activations;
    parameters and logits are float32.
    """

    strides: Strides = ((1, 1, 1), *((2, 2, 2),) * 5)
    filters: int = 32
    cap: int | None = None
    classes: int = 4
    in_channels: int = 4
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if (
            len(self.strides) < 2
            or self.rank not in CAPS
            or len({len(stage) for stage in self.strides}) > 1
        ):
            raise ValueError(
                "Need two stages or more, each with a stride per axis of 2 or 3 axes; got "
                f"{self.strides}."
            )

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.strides[0])

    @property
    def widths(self) -> list[int]:
        """Channels per stage."""
        cap = self.cap or CAPS[self.rank]
        return [min(self.filters * 2**stage, cap) for stage in range(len(self.strides))]

    def check_size(self, size: Sequence[int]) -> None:
        """Raise ValueError unless every side in `size` is divisible by its strides."""
        factors = tuple(map(math.prod, zip(*self.strides, strict=True)))
        if len(size) != self.rank or any(
            extent < factor or extent % factor for extent, factor in zip(size, factors, strict=True)
        ):
            raise ValueError(
                f"This nnU-Net shrinks its {self.rank} axes by {factors}, so the sides must be "
                "divisible by these; "
                f"got {tuple(size)}. Pad or crop the image, or use fewer stages."
            )


class ConvPair(nn.Module):
    """Twice: 3-convolution, instance norm, leaky ReLU; the first convolution has the stride."""

    config: NNUNetConfig
    filters: int
    strides: Sequence[int] | int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, *spatial, any) -> (batch, *spatial / strides, filters)."""
        sides, init = (3,) * self.config.rank, nn.initializers.he_normal()
        for strides in (self.strides, 1):
            conv = nn.Conv(
                self.filters, sides, strides, padding=1, kernel_init=init, dtype=self.config.dtype
            )
            x = nn.leaky_relu(InstanceNorm()(conv(x)), SLOPE)
        return x


class NNUNet(nn.Module):
    """Segmentation of images or volumes, channels last, with deep supervision."""

    config: NNUNetConfig = NNUNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array) -> tuple[jax.Array, ...]:
        """(batch, *spatial, in_channels) -> logits (batch, *spatial, classes), float32.

        Returns logits at full resolution, then those of the coarser stages, except the coarsest.
        """
        config = self.config
        self._check(image)
        x, skips = image.astype(config.dtype), []
        for stage, (width, strides) in enumerate(zip(config.widths, config.strides, strict=True)):
            x = ConvPair(config, width, strides, name=f"down_{stage}")(x)
            skips.append(x)
        outputs = []
        for stage in reversed(range(len(skips) - 1)):
            width, window = config.widths[stage], tuple(config.strides[stage + 1])
            x = nn.ConvTranspose(width, window, window, dtype=config.dtype, name=f"widen_{stage}")(
                x
            )
            x = ConvPair(config, width, name=f"up_{stage}")(jnp.concatenate([x, skips[stage]], -1))
            logits = nn.Conv(
                config.classes, (1,) * config.rank, dtype=config.dtype, name=f"head_{stage}"
            )(x)
            outputs.insert(0, logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        return tuple(outputs)

    def _check(self, image: jax.Array) -> None:
        if image.ndim != self.config.rank + 2 or image.shape[-1] != self.config.in_channels:
            raise ValueError(
                f"Expected an image of shape (batch, {self.config.rank} spatial axes, "
                f"{self.config.in_channels} "
                f"channels), channels last; got {image.shape}."
            )
        self.config.check_size(image.shape[1:-1])
