"""ResNet-50/101/152 with bottleneck blocks.

He et al., "Deep Residual Learning" (CVPR 2016), in the "v1.5" form, in which the 3x3 convolution of
a block has the stride (Gross and Wilber, 2016). Convolutions and the first pool have TensorFlow's
"SAME" padding. The last norm of each block starts at zero (Goyal et al., 2017). In a backbone for
dense prediction the last stages may dilate instead of striding (Chen et al., "Rethinking Atrous
Convolution for Semantic Image Segmentation", 2017).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

BLOCKS = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Depth -> blocks per stage; 14 and 26 are common small variants."""

EXPANSION = 4
"""Output channels of a bottleneck block per channel inside it."""

STEM_STRIDE = 4
"""Stride of the stem: image pixels per pixel of the first stage, along an axis."""


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture of a ResNet.

    Stage `i` has `filters * 2**i` channels inside its blocks and 4 times that between them. Stages
    that would exceed `output_stride` keep the size and dilate their 3x3 convolutions instead.
    `dtype` is that of activations; parameters and running statistics are float32. `remat` puts
    `jax.checkpoint` around each block.
    """

    depth: int = 50
    filters: int = 64
    classes: int = 1000
    dtype: Any = jnp.float32
    output_stride: int = 32
    remat: bool = False

    def __post_init__(self) -> None:
        if self.output_stride not in (4, 8, 16, 32):
            raise ValueError(
                f"A ResNet has an output stride of 4, 8, 16 or 32, not {self.output_stride}."
            )

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks per stage."""
        if self.depth not in BLOCKS:
            raise ValueError(f"No ResNet of depth {self.depth}; choose one of {sorted(BLOCKS)}.")
        return BLOCKS[self.depth]

    def stride(self, stage: int) -> int:
        """Stride of the first block of stage `stage`."""
        return 2 if stage and STEM_STRIDE * 2**stage <= self.output_stride else 1

    def dilation(self, stage: int) -> int:
        """Dilation of the 3x3 convolutions of stage `stage`."""
        return max(1, STEM_STRIDE * 2**stage // self.output_stride)


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3 (strided or dilated), 1x1 expand, plus a shortcut, projected if needed."""

    config: ResNetConfig
    filters: int
    stride: int
    dilation: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, h, w, any) -> (batch, h / stride, w / stride, 4 * filters)."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.config.dtype)
        norm = partial(batch_norm, self.config, train)
        wide, strides = self.filters * EXPANSION, (self.stride, self.stride)
        y = nn.relu(norm("norm_reduce")(conv(self.filters, (1, 1), name="reduce")(x)))
        y = conv(self.filters, (3, 3), strides, kernel_dilation=self.dilation, name="spatial")(y)
        y = nn.relu(norm("norm_spatial")(y))
        y = norm("norm_expand", scale_init=nn.initializers.zeros)(
            conv(wide, (1, 1), name="expand")(y)
        )
        if x.shape != y.shape:
            x = norm("norm_shortcut")(conv(wide, (1, 1), strides, name="shortcut")(x))
        return nn.relu(x + y)


def batch_norm(config: ResNetConfig, train: bool, name: str, **options: Any) -> nn.BatchNorm:
    """Batch norm with float32 statistics: of the batch in training, running ones in evaluation."""
    return nn.BatchNorm(
        not train, momentum=0.9, epsilon=1e-5, dtype=config.dtype, name=name, **options
    )


def stage_outputs(config: ResNetConfig, image: jax.Array, train: bool) -> list[jax.Array]:
    """(batch, h, w, 3) -> outputs of the four stages, finest first, in the calling module.

    Stage `i` returns (batch, h / s, w / s, 4 * filters * 2**i) with s = min(4 * 2**i,
    output_stride).
    """
    x = image.astype(config.dtype)
    x = nn.Conv(config.filters, (7, 7), (2, 2), use_bias=False, dtype=config.dtype, name="stem")(x)
    x = nn.relu(batch_norm(config, train, "norm_stem")(x))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    outputs = []
    bottleneck = nn.remat(Bottleneck, static_argnums=2) if config.remat else Bottleneck
    for stage, blocks in enumerate(config.blocks):
        filters, dilation = config.filters * 2**stage, config.dilation(stage)
        for block in range(blocks):
            stride = 1 if block else config.stride(stage)
            x = bottleneck(config, filters, stride, dilation, name=f"stage_{stage}_block_{block}")(
                x, train
            )
        outputs.append(x)
    return outputs


class Backbone(nn.Module):
    """A ResNet without head, for dense prediction; running statistics are in "batch_stats"."""

    config: ResNetConfig = ResNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> list[jax.Array]:
        """(batch, h, w, 3) -> the outputs of each stage, as in `stage_outputs`."""
        return stage_outputs(self.config, image, train)


class ResNet(nn.Module):
    """Image classifier, channels last; running statistics are in "batch_stats"."""

    config: ResNetConfig = ResNetConfig()

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """(batch, h, w, 3) -> logits (batch, classes), float32. In training, apply with
        `mutable=["batch_stats"]`.
        """
        config = self.config
        last = stage_outputs(config, image, train)[-1]
        logits = nn.Dense(config.classes, dtype=config.dtype, name="head")(last.mean((1, 2)))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
