"""Random variables of a model, without compiling its initialization."""

from __future__ import annotations

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
