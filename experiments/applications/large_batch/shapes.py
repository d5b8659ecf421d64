"""Small colour images of ten shapes, drawn from a seed: nothing is downloaded, and the same seed gives the same pixels.

A shape has any place, size and turn, is brighter or darker than its ground, and both lie under a slope of light and
noise. So a colour or a place says nothing of the class: only the outline does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SIDE = 16

Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Coordinates u, v of pixels in units of the shape's size, float64 [...] -> which pixels it covers, bool [...]."""

SHAPES: dict[str, Inside] = {
    "disc": lambda u, v: u**2 + v**2 < 1,
    "ring": lambda u, v: (u**2 + v**2 < 1) & (u**2 + v**2 > 0.3),
    "half disc": lambda u, v: (u**2 + v**2 < 1) & (u > 0),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.85,
    "frame": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.85) & (np.maximum(abs(u), abs(v)) > 0.45),
    "triangle": lambda u, v: (v > -0.6) & (v < 1 - 1.8 * abs(u)),
    "bar": lambda u, v: (abs(u) < 1) & (abs(v) < 0.3),
    "two bars": lambda u, v: (abs(u) < 1) & (abs(abs(v) - 0.6) < 0.25),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.25) & (np.maximum(abs(u), abs(v)) < 1),
    "corner": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.minimum(u, v) < -0.35),
}


@dataclass(frozen=True)
class Images:
    """Attributes:
    image: float32 [examples, SIDE, SIDE, 3], each channel about zero mean and unit variance over the whole set.
    label: int32 [examples], the position of the shape in `SHAPES`.
    """

    image: np.ndarray
    label: np.ndarray


def draw(examples: int, seed: int, noise: float = 0.5) -> Images:
    """`examples` images with independent labels; `noise` in units of the mean difference of shape and ground."""
    random = np.random.default_rng(seed)
    label = random.integers(0, len(SHAPES), examples).astype(np.int32)
    covered = _cover(label, random)
    contrast = random.choice((-1.0, 1.0), (examples, 1, 1, 3)) * random.uniform(0.5, 1.5, (examples, 1, 1, 3))
    pixels = contrast * covered[..., None] + _light(examples, random)
    pixels += random.normal(0, noise, pixels.shape)
    return Images(((pixels - pixels.mean()) / pixels.std()).astype(np.float32), label)


def _cover(label: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Which pixels are covered, bool [examples, SIDE, SIDE]."""
    examples = len(label)
    size = random.uniform(0.3, 0.45, examples) * SIDE
    middle = (SIDE - 1) / 2 + random.uniform(-2, 2, (2, examples))
    turn = random.uniform(-0.4, 0.4, examples)
    y, x = np.mgrid[:SIDE, :SIDE]
    x, y = (axis - place[:, None, None] for axis, place in zip((x, y), middle, strict=True))
    cos, sin, size = (value[:, None, None] for value in (np.cos(turn), np.sin(turn), size))
    u, v = (cos * x + sin * y) / size, (cos * y - sin * x) / size
    covered = np.empty(u.shape, bool)
    for number, inside in enumerate(SHAPES.values()):
        of_it = label == number
        covered[of_it] = inside(u[of_it], v[of_it])
    return covered


def _light(examples: int, random: np.random.Generator) -> np.ndarray:
    """A slope of any direction and colour, float64 [examples, SIDE, SIDE, 3]."""
    slope = random.normal(0, 0.5, (2, examples, 1, 1, 3))
    y, x = (axis[None, :, :, None] / SIDE - 0.5 for axis in np.mgrid[:SIDE, :SIDE])
    return slope[0] * x + slope[1] * y
