"""Learning rates and optimizers for large global batches, as optax schedules and transformations.

A step over n devices computes what one device computes with n times the batch: n times fewer updates an epoch, each of
a gradient with less noise. What keeps the accuracy is known: a rate that grows with the batch, reached slowly (Goyal et
al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677), and, for the largest batches, a
length of step for each layer (LARS, LAMB). A schedule takes the number of steps done, an integer, and gives the
learning rate, a float32 scalar array.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import optax

from memplan.errors import ScheduleError

Schedule = Callable[[Any], Any]
Mask = Callable[[Any], Any]
"""Parameters -> the same tree of bools."""


@dataclass(frozen=True)
class Epochs:
    """Steps in passes over the training set; what is left of it after the last whole batch is not counted.

    Attributes:
      examples: in the training set.
      global_batch: examples of one step, over all devices.

    Raises:
      ScheduleError: not positive integers, or a batch larger than the training set.
    """

    examples: int
    global_batch: int

    def __post_init__(self) -> None:
        _check_count("examples", self.examples, 1)
        _check_count("global_batch", self.global_batch, 1)
        if self.global_batch > self.examples:
            raise ScheduleError(
                f"a global batch of {self.global_batch} is larger than the training set of {self.examples} examples: "
                "an epoch has no step. Take fewer devices, or fewer examples on each."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.global_batch

    def steps(self, epochs: float) -> int:
        """Steps in so many epochs, which need not be whole, to the nearest step.

        Raises:
          ScheduleError: negative, or not a number.
        """
        _check_rate("epochs", epochs)
        return round(epochs * self.steps_per_epoch)


def scaled_rate(rate: float, base_batch: int, global_batch: int, power: float = 1.0) -> float:
    """The rate grows as the batch does: the linear scaling rule (Goyal et al., section 2.1).

    Args:
      rate: learning rate that is right for `base_batch`.
      power: of the growth. 1 is for SGD, whose step is the mean gradient. 0.5, the square root rule of LAMB's authors,
        is for LARS, LAMB and Adam: they divide by the gradient's length, which itself shrinks by about the square root
        while noise is most of it.

    Raises:
      ScheduleError: a rate or a power that is negative or not finite, a batch that is not a positive integer.
    """
    _check_rate("rate", rate)
    _check_rate("power", power)
    _check_count("base_batch", base_batch, 1)
    _check_count("global_batch", global_batch, 1)
    return rate * (global_batch / base_batch) ** power


def warmed_up(schedule: Schedule | float, warmup_steps: int, start: float) -> Schedule:
    """A straight line from `start` to the first rate of a schedule, and then the schedule (Goyal et al., section 2.2).

    Args:
      schedule: what follows, or the rate that stays. It counts its steps from the end of the warm-up: where it should
        end or decay with the training, make it `warmup_steps` shorter.
      warmup_steps: until the first rate of `schedule` is reached; 0 for none.
      start: rate of step 0; the base rate, where the scaled one is too large to begin with.

    Raises:
      ScheduleError: a rate that is negative or not finite, steps that are not a count.
    """
    _check_count("warmup_steps", warmup_steps, 0)
    _check_rate("start", start)
    after = _schedule(schedule)
    if not warmup_steps:
        return _in_float32(after)
    peak = float(after(0))
    _check_rate("the first rate of the schedule", peak)
    rise = optax.linear_schedule(start, peak, warmup_steps)
    return _in_float32(optax.join_schedules([rise, after], [warmup_steps]))


def rescaled(
    schedule: Schedule | float, old_batch: int, new_batch: int, at_step: int, warmup_steps: int, power: float = 1.0
) -> Schedule:
    """The schedule of a training that goes on with another global batch, because processes came or went.

    From `at_step` on the rate is multiplied by what grows in a straight line from 1 to that of `scaled_rate`, so
    nothing jumps. The schedule itself goes on by examples: with twice the batch, a step takes it two steps further, and
    it decays and ends after as many examples as before. Schedules that are rescaled can be rescaled again.

    Args:
      schedule: the one in use until now, or a constant rate.
      old_batch: examples of one step until now, over all devices; `new_batch`: from now on.
      at_step: the first step with the new batch.
      warmup_steps: with the new batch, until the factor is reached; at least 1.
      power: of the growth, as in `scaled_rate`.

    Raises:
      ScheduleError: batches, steps or a power that are none; two batches with hardly a common divisor, beyond int32.
    """
    _check_count("old_batch", old_batch, 1)
    _check_count("new_batch", new_batch, 1)
    _check_count("at_step", at_step, 0)
    _check_count("warmup_steps", warmup_steps, 1)
    share = Fraction(new_batch, old_batch)
    if share.numerator * share.denominator >= 2**31:
        raise ScheduleError(
            f"the batches {old_batch} and {new_batch} have too small a common divisor to count steps in 32 bits. Take "
            "batches that are multiples of the examples on one device."
        )
    before = _schedule(schedule)
    factor = optax.linear_schedule(1.0, scaled_rate(1.0, old_batch, new_batch, power), warmup_steps)

    def onward(steps: Any) -> Any:
        return factor(steps) * before(at_step + _converted(steps, share))

    return _in_float32(optax.join_schedules([before, onward], [at_step]))


def at_least_matrices(params: Any) -> Any:
    """True for parameters of two dimensions or more: neither biases, nor scales and offsets of norms."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)


def lars(
    rate: Schedule | float,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    adapted: Mask = at_least_matrices,
) -> optax.GradientTransformationExtraArgs:
    """SGD in which the length of a layer's update is a share of its weights' length (You et al., arXiv:1708.03888).

    Args:
      rate: the paper's global rate; rates of SGD times about the ratio of a gradient to its weights, over
        `trust_coefficient`: often 10 and more for large batches.
      weight_decay: part of the gradient whose length counts, as in the paper.
      adapted: which parameters have a trust ratio and decay. The others move as by SGD with `rate`. Where layers are
        stacked for a scan, norms have two dimensions too: then say it by name.
    """
    return optax.lars(
        rate,
        weight_decay=weight_decay,
        weight_decay_mask=adapted,
        trust_coefficient=trust_coefficient,
        eps=eps,
        trust_ratio_mask=adapted,
        momentum=momentum,
        nesterov=nesterov,
    )


def lamb(
    rate: Schedule | float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adapted: Mask = at_least_matrices,
) -> optax.GradientTransformationExtraArgs:
    """Adam in which the length of a layer's update is that of its weights (You et al., arXiv:1904.00962).

    As `optax.lamb`, which has a trust ratio for all parameters.

    Args:
      rate: share of its own length by which a layer moves.
      adapted: which parameters have a trust ratio and decay, see `lars`. The others move as by Adam with `rate`.
    """
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, adapted),
        optax.masked(optax.scale_by_trust_ratio(), adapted),
        optax.scale_by_learning_rate(rate),
    )


def _schedule(schedule: Schedule | float) -> Schedule:
    if callable(schedule):
        return schedule
    _check_rate("rate", schedule)
    return optax.constant_schedule(schedule)


def _in_float32(schedule: Schedule) -> Schedule:
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def _converted(steps: Any, share: Fraction) -> Any:
    """Steps times `share`, rounded down, without leaving int32 on the way."""
    whole, rest = steps // share.denominator, steps % share.denominator
    return whole * share.numerator + rest * share.numerator // share.denominator


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ScheduleError(
            f"{name} is {value!r}, not an integer of at least {least}. It is a count: give a whole number."
        )


def _check_rate(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise ScheduleError(f"{name} is {value!r}, not a finite number of at least 0. Check how it is computed.")
