"""Small colour images of ten shapes, drawn from a seed: the same seed gives the same pixels.

Shapes have random places, sizes and rotations, are brighter or darker than the background, and lie
under uneven light and noise. Colour and place carry no information about the class, only the
outline.
"""

from collections.abc import Callable

import numpy as np

SIDE = 16

# Pixel coordinates (u, v) in units of the shape's size, float64 [...] -> coverage, bool [...].
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
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


def draw(examples: int, seed: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [examples, SIDE, SIDE, 3] and labels int32 [examples], positions in `SHAPES`.

    Pixels have zero mean and unit variance over the whole set. `noise` is in units of the mean
    contrast between shape and background.
    """
    random = np.random.default_rng(seed)
    label = random.integers(0, len(SHAPES), examples).astype(np.int32)
    # Which pixels the shape covers: u, v are its own coordinates.
    size = random.uniform(0.3, 0.45, (examples, 1, 1)) * SIDE
    middle = (SIDE - 1) / 2 + random.uniform(-2, 2, (2, examples, 1, 1))
    turn = random.uniform(-0.4, 0.4, (examples, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y = columns - middle[0], rows - middle[1]
    u = (np.cos(turn) * x + np.sin(turn) * y) / size
    v = (np.cos(turn) * y - np.sin(turn) * x) / size
    covered = np.empty(u.shape, bool)
    for number, inside in enumerate(SHAPES.values()):
        covered[label == number] = inside(u[label == number], v[label == number])
    contrast = random.choice((-1.0, 1.0), (examples, 1, 1, 3)) * random.uniform(
        0.5, 1.5, (examples, 1, 1, 3)
    )
    slope = random.normal(0, 0.5, (2, examples, 1, 1, 3))
    light = slope[0] * (columns[..., None] / SIDE - 0.5) + slope[1] * (rows[..., None] / SIDE - 0.5)
    pixels = contrast * covered[..., None] + light
    pixels += random.normal(0, noise, pixels.shape)
    return ((pixels - pixels.mean()) / pixels.std()).astype(np.float32), label
