"""The shares of a device's peak rates that kernels achieve, by class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "convolution", "filter gradient"]
"""A class of matrix work; an input gradient counts as a convolution."""

WIDE = 1 << 30
"""Longer than any side of a product that a share depends on."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """What the share of a matrix product depends on, or of the implicit one of a convolution.

    The rows of a convolution's product are the pixels of the result, its columns the channels of
    the result, and it sums over the window and the channels of the image.
    """

    kind: Kind = "product"
    narrowest: int = WIDE  # the shortest of rows, columns, and what is summed over, of one group
    aligned: bool = True  # the channels of a pixel of the image are a multiple of 16 bytes
    volume: bool = False  # three spatial dimensions


def is_aligned(item_nbytes: int, channels: Iterable[int]) -> bool:
    """Are the pixels of a convolution's arrays, of so many channels, multiples of 16 bytes?"""
    return all(item_nbytes * count % 16 == 0 for count in channels)


PRODUCT = MatrixShape()
"""A product with long sides."""


@dataclass(frozen=True)
class Shares:
    """The shares of a peak rate that matrix work achieves, by class.

    Attributes:
      products, convolutions, filter_gradients: shares of work whose product has no narrow side.
      wide: length of a side from which on it is not narrow.
      convolution_exponent, filter_exponent: a share falls by this power of (narrowest side / wide).
      narrowest: a shorter side counts as this long.
      unaligned: how many times as long convolutions take whose pixels are not aligned.
    """

    products: float
    convolutions: float
    filter_gradients: float
    wide: int
    convolution_exponent: float
    filter_exponent: float
    narrowest: int
    unaligned: float

    def of_kind(self, kind: Kind) -> float:
        """The share of aligned work without a narrow side."""
        if kind == "product":
            return self.products
        return self.filter_gradients if kind == "filter gradient" else self.convolutions

    def factor(self, shape: MatrixShape) -> float:
        """The part of its kind's share that work of this shape achieves."""
        if shape.kind == "product":
            return 1.0
        is_filter = shape.kind == "filter gradient"
        exponent = self.filter_exponent if is_filter else self.convolution_exponent
        narrow = min(1.0, max(shape.narrowest, self.narrowest) / self.wide) ** exponent
        return narrow if shape.aligned else narrow / self.unaligned

    def of(self, shape: MatrixShape) -> float:
        """The share of matrix work of this shape."""
        return self.of_kind(shape.kind) * self.factor(shape)


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peak rates that XLA's kernels achieve on a device.

    Attributes:
      kernel_s: seconds of the shortest kernel, which every kernel takes besides.
      memory: share of the memory bandwidth.
      matrix_units, cores: shares of the peak FLOP/s of matrix work, by what computes it.
      volume_copies: how often convolutions of volumes read and write all their arrays besides, to
        change the layout.
      source: what the shares were measured on.
      error: the largest share by which predicted seconds were off, of the steps that were compared
        with a run or, on a calibrated device, of the operations that its shares were not fitted to;
        None if none was.
    """

    kernel_s: float
    memory: float
    matrix_units: Shares
    cores: Shares
    volume_copies: float
    source: str
    error: float | None = None


_PEAK_SHARES = Shares(1.0, 1.0, 1.0, 1, 0.0, 0.0, 1, 1.0)

PEAK = Efficiency(0.0, 1.0, _PEAK_SHARES, _PEAK_SHARES, 0.0, "The peak rates.")
"""The roofline: every kernel at the peak rates."""
