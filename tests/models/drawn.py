"""Random variables of a model, without compiling its initialization."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def drawn(init: Callable[..., Any], *args: Any) -> Any:
    """The variables of `init(key, *args)`, with all leaves random and variances positive."""
    random = np.random.default_rng(0)

    def leaf(path: Any, shape: Any) -> np.ndarray:
        values = random.uniform(-0.5, 0.5, shape.shape).astype(shape.dtype)
        return np.abs(values) + np.float32(0.1) if path[-1].key == "var" else values

    return jax.tree.map_with_path(leaf, jax.eval_shape(init, jax.random.key(0), *args))


def ones(variables: Any) -> Any:
    """All kernels, scales and variances one, means and biases zero: keeps values positive."""
    return jax.tree.map_with_path(
        lambda path, leaf: np.full(leaf.shape, path[-1].key not in ("bias", "mean"), leaf.dtype),
        variables,
    )


def count(params: Any) -> int:
    """The numbers in all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def reached(response: Any) -> set[tuple[int, int]]:
    """The pixels of one image and channel that are above zero."""
    return {tuple(map(int, pixel)) for pixel in np.argwhere(np.asarray(response)[0, :, :, 0] > 0)}
