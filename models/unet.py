"""U-Net of any spatial rank: the core that `models.unet2d` and `models.unet3d` share.

Ronneberger et al., "U-Net" (MICCAI 2015); Cicek et al., "3D U-Net" (MICCAI 2016), whose skips are
concatenated with the upsampled features. Instance normalization is by Ulyanov et al. (2016), as in
nnU-Net (Isensee et al., 2021). Unlike the original, convolutions are padded, so labels have the
size of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

Norm = Literal["instance", "group"] | None
Upsampling = Literal["nearest", "transpose"]


@dataclass(frozen=True)
class UNetConfig:
    """Architecture of a U-Net.

    Level `i` (0 is full resolution) has size `size / 2**i` and `filters * 2**i` channels, and two
    3-convolutions each on the way down and up. With the defaults the last decoder level
    concatenates 64 upsampled and 32 skipped channels at full resolution. "nearest" upsampling keeps
    the channels; "transpose" halves them.

    `dtype` is that of activations; parameters are float32. `remat` puts `jax.checkpoint` around
    each pair of convolutions.
    """

    levels: int = 4
    filters: int = 32
    classes: int = 4
    in_channels: int = 4
    norm: Norm = "instance"
    upsampling: Upsampling = "nearest"
    dtype: Any = jnp.float32
    remat: bool = False

    def check_size(self, size: Sequence[int]) -> None:
        """Raise ValueError unless every side in `size` can be halved `levels - 1` times."""
        factor = 2 ** (self.levels - 1)
        if any(extent < factor or extent % factor for extent in size):
            raise ValueError(
                f"U-Net with {self.levels} levels halves the image {self.levels - 1} times, so "
                "every side must be "
                f"divisible by {factor}; got {tuple(size)}. Pad or crop the image, or use fewer "
                "levels."
            )


class InstanceNorm(nn.Module):
    """Normalize each sample and channel over space, then scale and shift; float32 statistics."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, *spatial, channels) -> same shape and dtype."""
        axes = tuple(range(1, x.ndim - 1))
        channels = (x.shape[-1],)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(axes, keepdims=True)
        variance = jnp.square(centred).mean(axes, keepdims=True)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)


def upsample_nearest(x: jax.Array) -> jax.Array:
    """Double every spatial axis of (batch, *spatial, channels) by repetition.

    Uses a broadcast and a reshape: their gradient is a sum, that of a gather would be a scatter.
    """
    batch, *spatial, channels = x.shape
    thin = x.reshape(batch, *(extent for side in spatial for extent in (side, 1)), channels)
    wide = jnp.broadcast_to(
        thin, (batch, *(extent for side in spatial for extent in (side, 2)), channels)
    )
    return wide.reshape(batch, *(2 * side for side in spatial), channels)


class ConvBlock(nn.Module):
    """Twice: 3-convolution, norm, ReLU."""

    config: UNetConfig
    filters: int
    rank: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, *spatial, any) -> (batch, *spatial, filters)."""
        norm = self.config.norm
        for _ in range(2):
            # No bias before a norm, which would subtract it with the mean.
            x = nn.Conv(
                self.filters, (3,) * self.rank, use_bias=norm is None, dtype=self.config.dtype
            )(x)
            x = nn.relu(self._normalize(x))
        return x

    def _normalize(self, x: jax.Array) -> jax.Array:
        match self.config.norm:
            case "instance":
                return InstanceNorm()(x)
            case "group":
                return nn.GroupNorm(num_groups=min(8, self.filters), dtype=self.config.dtype)(x)
            case None:
                return x
        raise ValueError(f"Unknown norm {self.config.norm!r}; use 'instance', 'group' or None.")


class UNet(nn.Module):
    """U-Net over `rank` spatial axes, channels last."""

    config: UNetConfig
    rank: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """(batch, *spatial, in_channels) -> logits (batch, *spatial, classes), float32."""
        self._check(image)
        config, window = self.config, (2,) * self.rank
        widths = [config.filters * 2**level for level in range(config.levels)]
        x, skips = image.astype(config.dtype), []
        block = nn.remat(ConvBlock) if config.remat else ConvBlock
        for level, width in enumerate(widths):
            if level:
                skips.append(x)
                x = nn.max_pool(x, window, strides=window)
            x = block(config, width, self.rank, name=f"down_{level}")(x)
        for level in reversed(range(config.levels - 1)):
            x = jnp.concatenate([self._upsample(x, level), skips[level]], axis=-1)
            x = block(config, widths[level], self.rank, name=f"up_{level}")(x)
        logits = nn.Conv(config.classes, (1,) * self.rank, dtype=config.dtype, name="head")(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _upsample(self, x: jax.Array, level: int) -> jax.Array:
        match self.config.upsampling:
            case "nearest":
                return upsample_nearest(x)
            case "transpose":
                window = (2,) * self.rank
                width = self.config.filters * 2**level
                return nn.ConvTranspose(
                    width, window, window, dtype=self.config.dtype, name=f"widen_{level}"
                )(x)
        raise ValueError(
            f"Unknown upsampling {self.config.upsampling!r}; use 'nearest' or 'transpose'."
        )

    def _check(self, image: jax.Array) -> None:
        if image.ndim != self.rank + 2 or image.shape[-1] != self.config.in_channels:
            raise ValueError(
                f"Expected an image of shape (batch, {self.rank} spatial axes, "
                f"{self.config.in_channels} channels), "
                f"channels last; got {image.shape}."
            )
        self.config.check_size(image.shape[1:-1])
