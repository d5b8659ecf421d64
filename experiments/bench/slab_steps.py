"""Training steps for slabs, with arrays: one that exceeds memory, and one for each use of slabs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.steps import Batch, Built, TrainState, make_step
from models.train import decoder_step, resnet_step, unet2d_step, unet3d_step
from models.unet3d import UNet3DConfig


def parcellation(size: int, classes: int = 96) -> Built:
    """Segments a volume of `size`^3 voxels into many regions, so that logits dominate the memory.

    A 3D U-Net with 2 levels and 8 filters; the state and the volume are arrays.
    """
    config = UNet3DConfig(levels=2, filters=8, in_channels=1, classes=classes)
    step, _ = unet3d_step(size, config=config)
    _, (state, _) = unet3d_step(8, config=config, concrete=True)
    return step, (state, regions(size, classes))


def regions(size: int, classes: int, seed: int = 0) -> Batch:
    """Convex regions around random points in a ball, each with its own intensity; 0 is outside."""
    random = np.random.default_rng(seed)
    points = random.uniform(0, size, (classes - 1, 3)).astype(np.float32)
    intensities = np.append(0, random.normal(size=classes - 1)).astype(np.float32)
    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    in_plane = (rows[..., None] - points[:, 1]) ** 2 + (columns[..., None] - points[:, 2]) ** 2
    label = np.empty((size, size, size), np.int32)
    for plane in range(size):
        middle = (size - 1) / 2
        inside = (plane - middle) ** 2 + (rows - middle) ** 2 + (columns - middle) ** 2 <= (
            0.45 * size
        ) ** 2
        label[plane] = np.where(
            inside, 1 + np.argmin(in_plane + (plane - points[:, 0]) ** 2, -1), 0
        )
    image = intensities[label] + 0.2 * random.standard_normal(label.shape, np.float32)
    return {"image": jnp.asarray(image[None, ..., None]), "label": jnp.asarray(label[None])}


@dataclass(frozen=True)
class Face:
    """A small step, and an axis of it to slice."""

    make: Callable[[], Built]
    axis: str  # in words
    shape: tuple[int, ...]  # of the first array with the axis
    dim: int  # the dimension of that array that is the axis
    rows: int  # of that array in a slab


def wide_mlp(tokens: int = 96, width: int = 16, wide: int = 256) -> Built:
    """Two residual layers with a hidden width of `wide`."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        for into, out in params:
            x = x + jax.nn.gelu(x @ into) @ out
        return x

    return _regression(model, tokens, width, [[(width, wide), (wide, width)]] * 2)


def attention(tokens: int = 96, width: int = 16, layers: int = 2) -> Built:
    """Residual layers of unfused single-head attention."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        for query, key, value in params:
            scores = (x @ query) @ (x @ key).T / width**0.5
            x = x + jax.nn.softmax(scores) @ (x @ value)
        return x

    return _regression(model, tokens, width, [[(width, width)] * 3] * layers)


def _regression(
    model: Callable[[Any, jax.Array], jax.Array],
    tokens: int,
    width: int,
    shapes: list[list[tuple[int, int]]],
) -> Built:
    """Mean squared error on random tokens; SGD with momentum."""
    random, optimizer = np.random.default_rng(0), optax.sgd(1e-2, momentum=0.9)

    def normals(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(random.normal(size=(rows, columns)), jnp.float32)

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        return jnp.square(model(params, batch["x"]) - batch["y"]).mean(), batch_stats

    params = [[normals(*shape) * (2 / shape[0]) ** 0.5 for shape in layer] for layer in shapes]
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params))
    return make_step(loss, optimizer), (
        state,
        {"x": normals(tokens, width), "y": normals(tokens, width)},
    )


_DECODER: Mapping[str, Any] = {"layers": 2, "width": 32, "heads": 4, "vocab": 512, "context": 64}
_unet3d = partial(unet3d_step, 24, levels=2, filters=4, concrete=True)
_unet2d = partial(unet2d_step, 64, 2, levels=3, filters=8, concrete=True)
_resnet = partial(resnet_step, 32, 16, depth=14, filters=8, classes=10, concrete=True)
_decoder = partial(decoder_step, batch=2, tokens=64, **_DECODER, concrete=True)
FACES: Mapping[str, Face] = {
    "unet3d": Face(_unet3d, "depth of a volume", (1, 24, 24, 24, 4), 1, 8),
    "unet2d": Face(_unet2d, "height of an image", (2, 64, 64, 8), 1, 16),
    "resnet": Face(_resnet, "batch", (16, 32, 32, 3), 0, 4),
    "decoder": Face(_decoder, "tokens of text", (2, 64, 512), 1, 16),
    "wide_mlp": Face(wide_mlp, "tokens of a wide MLP", (96, 256), 0, 24),
    "attention": Face(attention, "query rows", (96, 96), 0, 24),
}
