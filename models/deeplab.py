"""DeepLabV3+: a dilated ResNet, a pyramid of atrous convolutions, and a small decoder.

Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation"
(ECCV 2018), but with ordinary convolutions in pyramid and decoder. Images may have any size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.resnet import Backbone, ResNetConfig, batch_norm


@dataclass(frozen=True)
class DeepLabConfig:
    """Architecture of a DeepLabV3+; defaults follow PASCAL VOC.

    `depth`, `filters`, `output_stride` and `remat` are those of the ResNet. Branches of the pyramid
    and convolutions of the decoder have `width` channels; the decoder also reads `shallow` channels
    of the first stage. `rates` are the dilations of the pyramid's 3x3 convolutions; the paper
    doubles them for an output stride of 8. `dtype` is that of activations; parameters, running
    statistics and logits are float32.
    """

    depth: int = 101
    filters: int = 64
    classes: int = 21
    output_stride: int = 16
    rates: Sequence[int] = (6, 12, 18)
    width: int = 256
    shallow: int = 48
    dtype: Any = jnp.float32
    remat: bool = False

    @property
    def backbone(self) -> ResNetConfig:
        """The ResNet, used without its head."""
        dtype, stride = self.dtype, self.output_stride
        return ResNetConfig(
            self.depth, self.filters, dtype=dtype, output_stride=stride, remat=self.remat
        )


def upsample_bilinear(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Enlarge (batch, *spatial, channels) to the spatial `size`, with half-pixel centers."""
    return jax.image.resize(x, (x.shape[0], *size, x.shape[-1]), "bilinear")


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    config: DeepLabConfig
    channels: int
    side: int = 1
    rate: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h, w, channels)."""
        sides, dtype = (self.side, self.side), self.config.dtype
        x = nn.Conv(
            self.channels,
            sides,
            kernel_dilation=self.rate,
            use_bias=False,
            dtype=dtype,
            name="conv",
        )(x)
        return nn.relu(batch_norm(self.config.backbone, train, "norm")(x))


class AtrousPyramid(nn.Module):
    """A 1x1 convolution, 3x3 ones at several rates and the image's mean, concatenated and mixed."""

    config: DeepLabConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h, w, width)."""
        config, width = self.config, self.config.width
        mean = ConvNorm(config, width, name="pool")(x.mean((1, 2), keepdims=True), train)
        branches = [ConvNorm(config, width, name="point")(x, train)]
        branches += [
            ConvNorm(config, width, 3, rate, name=f"atrous_{rate}")(x, train)
            for rate in config.rates
        ]
        branches += [jnp.broadcast_to(mean, branches[0].shape)]
        return ConvNorm(config, width, name="mix")(jnp.concatenate(branches, -1), train)


class DeepLab(nn.Module):
    """Semantic segmentation of images, channels last; running statistics are in "batch_stats"."""

    config: DeepLabConfig = DeepLabConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """(batch, h, w, 3) -> logits (batch, h, w, classes), float32.

        In training, apply with `mutable=["batch_stats"]` and at least two images: the pyramid's
        mean is one pixel per image, and batch norm over a single pixel gives zero.
        """
        config = self.config
        first, *_, last = Backbone(config.backbone, name="backbone")(image, train)
        deep = AtrousPyramid(config, name="pyramid")(last, train)
        shallow = ConvNorm(config, config.shallow, name="shallow")(first, train)
        x = jnp.concatenate([upsample_bilinear(deep, shallow.shape[1:3]), shallow], -1)
        for number in range(2):
            x = ConvNorm(config, config.width, 3, name=f"decode_{number}")(x, train)
        logits = nn.Conv(config.classes, (1, 1), dtype=config.dtype, name="head")(x)
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return upsample_bilinear(wide, image.shape[1:3])
