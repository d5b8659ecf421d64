"""Photographs as a network takes them: the middle square, shrunk, in bytes. Training and detector share this."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from experiments.datasets import DatasetError

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue in ImageNet, as shares of full brightness: what networks for photographs are used to."""


def opened(path: Path) -> Image.Image:
    """The picture, decoded to its last pixel.

    Raises:
      DatasetError: the file is absent, cut short or no picture.
    """
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture
    except FileNotFoundError as error:
        raise DatasetError(path, "the file is missing", "Unpack the data set again.") from error
    except UnidentifiedImageError as error:
        raise DatasetError(path, "no picture that Pillow knows", "Fetch it again, or convert it to JPEG.") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(
            path, f"truncated or corrupt ({error})", "Fetch the file again; no pixel was used."
        ) from error


def pixels(path: Path, side: int) -> np.ndarray:
    """The middle square of a photograph, uint8 [side, side, 3]."""
    return np.asarray(square(opened(path).convert("RGB"), side, Image.Resampling.BILINEAR))


def square(picture: Image.Image, side: int, resampling: Image.Resampling) -> Image.Image:
    """The middle square of any picture, `side` pixels wide; when shrunk, "BILINEAR" averages what falls together."""
    return ImageOps.fit(picture, (side, side), resampling)
