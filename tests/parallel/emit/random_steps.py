"""Random training steps, made of every primitive that the partitioner has a rule for.

A step is drawn from a list of numbers, so hypothesis shrinks it, and every trace of it comes out the same. In *exact*
steps all values are small whole numbers, every sum is exact in whatever order, and results must be equal to the bit;
the others are smooth, and results equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.parallel.emit.operations import Array, Dice, Op

FEATURES, TIME = 6, 4


@dataclass(frozen=True)
class Drawn:
    """A step `(state, batch) -> (state, results)` with its arguments.

    Attributes:
      sizes: of the mesh that it is to be divided over.
      batch_axis: dimension of the batch's leaves that is divided.
      split_state: half of the state is divided too.
      exact: its results are equal to the bit.
    """

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any
    sizes: tuple[int, ...]
    batch_axis: int
    split_state: bool
    exact: bool


MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (3,), (2, 2), (8,), (6,), (5,), (7,), (2, 3))
ROUNDS = 8  # of a single operation; of many, each comes three times


def drawn_step(numbers: Sequence[int], ops: Mapping[str, Op], exact: bool, meshes: Any = MESHES) -> Drawn:
    """A step of these operations: one of them several times, or if they are many each of them, one after the other."""
    dice = Dice(numbers)
    sizes, axis, split_state = dice.of(meshes), dice.below(2), bool(dice.below(2))
    shuffled, learns = dice.below(4) == 1, dice.below(2) == 1
    first_in_step = dice.at
    rows = 35 if sizes in ((5,), (7,)) else 24
    made = arguments(rows, axis, exact)

    def step(state: Any, batch: Any) -> Any:
        dice.at = first_in_step
        moved = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0) if shuffled else leaf, batch)

        def loss(weights: Any) -> Any:
            results = applied(dice, list(ops.values()), moved, weights, exact)
            return sum(one.astype(jnp.float32).sum() for one in results), results

        if learns:
            (value, results), gradient = jax.value_and_grad(loss, has_aux=True)(state["weights"])
        else:
            value, results = loss(state["weights"])
            gradient = jax.tree.map(lambda w: w * value, state["weights"])
        rate = jnp.float32(0.5)
        weights = jax.tree.map(lambda w, g: w - rate * g, state["weights"], gradient)
        moments = jax.tree.map(lambda m, g: rate * m + g, state["moments"], gradient)
        return {"weights": weights, "moments": moments}, (value, results)

    return Drawn(step, *made, sizes, axis, split_state, exact)


def arguments(rows: int, axis: int, exact: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)

    def array(*shape: int) -> np.ndarray:
        values = rng.integers(-2, 3, shape) if exact else rng.uniform(-1, 1, shape)
        return values.astype(np.float32)

    weights = {"w": array(FEATURES, FEATURES), "b": array(FEATURES), "scale": array()}
    batch = {"x": array(rows, FEATURES), "y": array(rows, TIME, FEATURES)}
    batch = {name: np.ascontiguousarray(np.moveaxis(leaf, 0, axis)) for name, leaf in batch.items()}
    return {"weights": weights, "moments": jax.tree.map(np.zeros_like, weights)}, batch


def applied(dice: Dice, ops: Sequence[Op], batch: Any, weights: Any, exact: bool) -> list[Array]:
    """The results of one operation again and again, or of many, on the values of examples, on weights, or on both."""
    made: list[Array] = []
    examples = jax.tree.leaves(batch)
    sources = examples, examples, [*examples, *jax.tree.leaves(weights)]
    values = [chosen(dice, leaves, weights, exact) for leaves in sources]
    rounds = [dice.of(values) for _ in range(ROUNDS)] if len(ops) == 1 else values
    for x in rounds:
        x = settled(dice.of(made), exact) if made and dice.below(6) == 1 else x
        for op in ops:
            start = dice.at

            def again(x: Array, op: Op = op, start: int = start) -> Array:
                dice.at = start
                return op(dice, x)

            made.append(jax.jit(again)(x) if dice.below(8) == 1 else again(x))
    return made


def chosen(dice: Dice, leaves: list[Array], weights: Any, exact: bool) -> Array:
    x = dice.of(leaves)
    if dice.below(2) and x.shape[-1:] == (FEATURES,):
        x = x @ weights["w"]
    return settled(x, exact)


def settled(x: Array, exact: bool) -> Array:
    """Small again, and not too much of it."""
    x = x.astype(jnp.float32)
    while x.size > 2000:
        x = x.sum(int(np.argmin(x.shape)))
    return bounded(x) if exact else jnp.tanh(x)


@jax.custom_vjp
def bounded(x: Array) -> Array:
    """And so is its gradient, or a chain of these would leave the whole numbers that floats can hold."""
    return lax.clamp(-3.0, x, 3.0)


bounded.defvjp(lambda x: (bounded(x), None), lambda _, given: (lax.clamp(-3.0, jnp.round(given), 3.0),))
