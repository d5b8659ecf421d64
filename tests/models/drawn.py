"""Variables of a model without compiling what makes them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def drawn(init: Callable[..., Any], *args: Any) -> Any:
    """What `init(key, *args)` makes, every leaf random, norms and biases too; variances are positive."""
    random = np.random.default_rng(0)

    def leaf(path: Any, shape: Any) -> np.ndarray:
        values = random.uniform(-0.5, 0.5, shape.shape).astype(shape.dtype)
        return np.abs(values) + np.float32(0.1) if path[-1].key == "var" else values

    return jax.tree.map_with_path(leaf, jax.eval_shape(init, jax.random.key(0), *args))
