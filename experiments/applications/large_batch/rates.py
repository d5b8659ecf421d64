"""Learning rates for large global batches, as optax schedules.

A rate that grows with the batch, reached slowly (Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1
Hour", arXiv:1706.02677). A schedule takes the number of steps done and gives the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class Epochs:
    """Steps in passes over the training set; what is left of it after the last whole batch is not counted.

    Attributes:
      global_batch: examples of one step, over all devices.
    """

    examples: int
    global_batch: int

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.global_batch

    def steps(self, epochs: float) -> int:
        """Steps in so many epochs, which need not be whole, to the nearest step."""
        return round(epochs * self.steps_per_epoch)


def scaled_rate(rate: float, base_batch: int, global_batch: int, power: float = 1.0) -> float:
    """The rate grows as the batch does: the linear scaling rule (Goyal et al., section 2.1).

    Args:
      rate: learning rate that is right for `base_batch`.
      power: of the growth: 1 for SGD; 0.5, the square root rule, where an optimizer divides by the gradient's length.
    """
    return rate * (global_batch / base_batch) ** power


def warmed_up(schedule: Schedule, warmup_steps: int, start: float) -> Schedule:
    """A straight line from `start` to the first rate of a schedule, and then that (Goyal et al., section 2.2)."""
    rise = optax.linear_schedule(start, float(schedule(0)), warmup_steps)
    return optax.join_schedules([rise, schedule], [warmup_steps])


def at_least_matrices(params: Any) -> Any:
    """True for parameters of two dimensions or more: neither biases, nor scales and offsets of norms."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)
