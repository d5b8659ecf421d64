"""Logits of a volume of any size: at once, or window by window with the windows stitched together on the host.

Windows are spread evenly and overlap, as nnU-Net places them (Isensee et al., Nature Methods 2021); their logits are
averaged with Gaussian weights, sigma an eighth of the window, as in nnU-Net and MONAI (Cardoso et al., 2022). Both keep
the sums on the device if they fit; here one batch of windows is all that ever stands there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Predict = Callable[[np.ndarray], Any]
"""float32 [B, *window, M] -> logits float32 [B, *window, C], an array of jax or numpy."""
Corner = tuple[int, ...]
FINENESS = 2.0**16
"""Weights are multiples of one over this: a float32 times a weight is exact in float64, so are sums of thousands."""


@dataclass(frozen=True)
class Windows:
    """How a volume is cut.

    Attributes:
      size: voxels of a window along each spatial axis.
      overlap: of neighbours, as a share of `size`: at least so much, less what a whole voxel rounds away.
      sigma: of the Gaussian weights, as a share of `size`.
      batch: windows predicted at a time.
    """

    size: tuple[int, ...]
    overlap: float = 0.5
    sigma: float = 1 / 8
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.size or min(self.size) < 1 or not 0 <= self.overlap < 1 or self.sigma <= 0 or self.batch < 1:
            raise ValueError(
                f"Windows need sides of at least 1 voxel, an overlap in [0, 1), a sigma above 0 and a batch of at "
                f"least 1; got {self}."
            )


def whole(predict: Predict, image: np.ndarray, multiple: int = 1) -> np.ndarray:
    """Logits float32 [X, Y, Z, C] of an image [X, Y, Z, M], predicted at once.

    Args:
      multiple: of what a side must be, 2^(levels - 1) for a U-Net: the image is padded with zeros all around and the
        logits are cropped again.
    """
    sides = tuple(-(-extent // multiple) * multiple for extent in image.shape[:-1])
    padded, inner = _pad(image, sides)
    return _predicted(predict, padded[None])[0][inner]


def sliding(predict: Predict, image: np.ndarray, windows: Windows) -> np.ndarray:
    """Logits float32 [X, Y, Z, C] of an image [X, Y, Z, M], averaged over all windows that see a voxel.

    Where all windows agree on a voxel, the average is what they say, to the bit. An image smaller than the window is
    padded with zeros all around.

    Raises:
      ValueError: the window has not one side per spatial axis, or `predict` answers in another shape.
    """
    if image.ndim != len(windows.size) + 1:
        raise ValueError(f"windows of {windows.size} voxels do not cut an image {image.shape}: channels come last.")
    padded, inner = _pad(image, tuple(map(max, image.shape, windows.size)))
    weight = importance(windows)[..., None]
    total, weights = None, np.zeros((*padded.shape[:-1], 1))
    for corners in _batches(list(places(padded.shape[:-1], windows)), windows.batch):
        logits = _predicted(predict, np.stack([padded[_box(corner, windows.size)] for corner in corners]))
        if total is None:
            total = np.zeros((*padded.shape[:-1], logits.shape[-1]))
        for corner, part in dict(zip(corners, logits, strict=True)).items():  # each place once
            total[_box(corner, windows.size)] += weight * part
            weights[_box(corner, windows.size)] += weight
    assert total is not None
    return (total / weights)[inner].astype(np.float32)


def places(shape: Sequence[int], windows: Windows) -> Iterator[Corner]:
    """The corners of all windows in a volume at least as large as one: evenly spread, ends included."""
    sides = zip(shape, windows.size, strict=True)
    return itertools.product(*(_starts(extent, side, windows.overlap) for extent, side in sides))


def importance(windows: Windows) -> np.ndarray:
    """Weights float64 [*size] in (0, 1]: a Gaussian about the middle, in steps of 1 / `FINENESS`, never zero."""
    falls = (np.exp(-0.5 * ((np.arange(n) - (n - 1) / 2) / (windows.sigma * n)) ** 2) for n in windows.size)
    product = np.ones(())
    for fall in falls:
        product = product[..., None] * fall
    return np.maximum(np.rint(product * FINENESS), 1) / FINENESS


def _starts(extent: int, side: int, overlap: float) -> list[int]:
    """Where windows begin along one axis: as few as overlap by the share, less than a voxel short of it."""
    room = extent - side
    steps = math.ceil(room / max(side * (1 - overlap), 1))
    return [room * number // steps for number in range(steps + 1)] if steps else [0]


def _batches(corners: list[Corner], size: int) -> Iterator[list[Corner]]:
    """All of one size, so that one program is compiled: the last corner fills the last batch up."""
    for start in range(0, len(corners), size):
        batch = corners[start : start + size]
        yield batch + batch[-1:] * (size - len(batch))


def _box(corner: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + side) for low, side in zip(corner, size, strict=True))


def _pad(image: np.ndarray, sides: Sequence[int]) -> tuple[np.ndarray, tuple[slice, ...]]:
    """The image amid zeros, and where it lies in them; an odd voxel is added at the high end."""
    extents = image.shape[:-1]
    inner = _box([(side - extent) // 2 for side, extent in zip(sides, extents, strict=True)], extents)
    padded = np.zeros((*sides, image.shape[-1]), image.dtype)
    padded[inner] = image
    return padded, inner


def _predicted(predict: Predict, images: np.ndarray) -> np.ndarray:
    logits = np.asarray(predict(images))
    if logits.shape[:-1] != images.shape[:-1]:
        raise ValueError(
            f"the prediction of {images.shape} has shape {logits.shape}: all axes but the last must agree."
        )
    return logits
