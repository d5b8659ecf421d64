"""Training steps small enough for interpreted kernels, and a planner that moves what others would recompute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.planning.problem import Problem
from memplan.planning.registry import PLANNERS
from memplan.planning.solution import Solution
from memplan.planning.timing import CopySeconds
from models import train
from models.unet3d import UNet3DConfig


@dataclass(frozen=True)
class CheapCopies:
    """memplan's own planner, for whom a copy takes no time: at toy size recomputing is faster than any real link."""

    name: str = "cheap copies"

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Solution:
        free = None if copy_s is None else lambda nbytes: 1e-12 * nbytes
        return PLANNERS["kernels"].plan(problem, budget_nbytes, host_nbytes, free)


def mlp(layers: int = 6, width: int = 64, rows: int = 4096) -> tuple[Any, Any]:
    """Tanh layers and a mean square, by gradient descent: step(params, batch) -> (params, loss)."""
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((width, width)).astype(np.float32) / 8 for _ in range(layers)]
    batch = draw.standard_normal((rows, width)).astype(np.float32)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step, jax.tree.map(jnp.asarray, (params, batch))


TOYS = {
    "mlp": mlp,
    "wide mlp": partial(mlp, 8, 512, 64),  # parameters of 1 MiB, which `host_state` keeps on the host
    "unet3d": partial(train.unet3d_step, 16, config=UNet3DConfig(levels=3, filters=4), concrete=True),
}
