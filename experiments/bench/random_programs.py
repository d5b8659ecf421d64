"""Random training programs with nested loops, branches and effects, each generated from its number.

The layers of `random_steps.py` are nested three levels deep in scans over stacked weights, loops
with a fixed or a data-dependent number of trips, branches, `jax.checkpoint` and jitted calls. In
some programs the outermost level is a loop over whole training steps. Three in four programs write
numbers to `EFFECTS`: at the entry, in branches and in bodies of loops. Only what jax forbids is
left out: input and output under `jax.checkpoint`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from experiments.bench.random_steps import LAYERS

Array = jax.Array
DEPTH = 3
_RATE = 1e-2
_TRIPS = (2, 3, 4)


@dataclass(frozen=True)
class Effect:
    """A number that a program wrote."""

    kind: str  # "ordered", "unordered", or "pure": a callback that may run any number of times
    tag: int  # the place in the program
    value: float


EFFECTS: list[Effect] = []


def drain_effects() -> list[Effect]:
    """Return and clear the effects written so far."""
    jax.effects_barrier()
    effects = EFFECTS[:]
    EFFECTS.clear()
    return effects


def _write(kind: str, tag: int, value: Any) -> None:
    EFFECTS.append(Effect(kind, tag, float(value)))


def _answer(kind: str, tag: int, value: Any) -> np.float32:
    """Write a number; return another one that depends on it."""
    _write(kind, tag, value)
    return np.float32(1 + math.sin(value) / 8)


def _answered(call: Callable[..., Any]) -> Callable[[Array, Array], Array]:
    """A callback whose result scales the layer; neither is differentiated."""
    return lambda x, value: x * call(value).astype(x.dtype)


def _unanswered(call: Callable[..., Any]) -> Callable[[Array, Array], Array]:
    """A callback without a result."""

    def unanswered(x: Array, value: Array) -> Array:
        call(value)
        return x

    return unanswered


_NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
Call = Callable[[int], Callable[[Array, Array], Array]]
"""tag -> (x, number to write) -> x."""
_DEBUG: Sequence[Call] = (
    lambda tag: _unanswered(
        partial(jax.debug.callback, partial(_write, "ordered", tag), ordered=True)
    ),
    lambda tag: _unanswered(partial(jax.debug.callback, partial(_write, "unordered", tag))),
)


def _pure(tag: int) -> Callable[[Array, Array], Array]:
    return _answered(partial(jax.pure_callback, partial(_answer, "pure", tag), _NUMBER))


_IO: Sequence[Call] = (
    lambda tag: _unanswered(
        partial(io_callback, partial(_write, "ordered", tag), None, ordered=True)
    ),
    lambda tag: _answered(
        partial(io_callback, partial(_answer, "ordered", tag), _NUMBER, ordered=True)
    ),
    lambda tag: _answered(partial(io_callback, partial(_answer, "unordered", tag), _NUMBER)),
)

Weights = Any
Apply = Callable[[Weights, Array, Array], Array]
"""(weights, output of the previous block, number of the training step) -> the same shape."""


@dataclass(frozen=True)
class Block:
    """A part of a program.

    Attributes:
      init: leading dimensions of each weight -> the weights.
    """

    init: Callable[[tuple[int, ...]], Weights]
    apply: Apply


@dataclass
class Drawing:
    """The state from which a program is generated."""

    draw: random.Random
    normal: Callable[..., np.ndarray]
    width: int
    dtype: Any
    writes: float  # share of places with an effect
    tags: list[int] = field(default_factory=list)

    def tag(self) -> int:
        self.tags.append(len(self.tags))
        return self.tags[-1]

    def written(self, remade: bool) -> Callable[[Array], Array]:
        """An effect or none; `remade` says whether it is under `jax.checkpoint`."""
        if self.draw.random() >= self.writes:
            return lambda x: x
        call = self.draw.choice((*_DEBUG, _pure, *(() if remade else _IO)))(self.tag())
        return lambda x: call(x, lax.stop_gradient(x[0, 0].astype(jnp.float32)))

    def block(self, depth: int, remade: bool = False) -> Block:
        """A block of `depth` levels."""
        return self.draw.choice(_NESTS)(self, depth, remade) if depth else _leaf(self, remade)

    def sides(self, depth: int, count: int, remade: bool) -> list[Block]:
        """Branches, one of `depth` levels and the others of one layer."""
        deep = self.draw.randrange(count)
        return [self.block(depth if number == deep else 0, remade) for number in range(count)]

    def decided(self) -> Callable[[Array, Array], Array]:
        """The index of a branch, from the data or from the number of the step."""
        if self.draw.random() < 0.5:
            return lambda x, at: jnp.abs(x[0, 0] * 64).astype(jnp.int32)
        return lambda x, at: at


def _leaf(drawing: Drawing, remade: bool) -> Block:
    kinds = [drawing.draw.choice(list(LAYERS)) for _ in range(drawing.draw.choice((1, 1, 2)))]
    written, tag = drawing.written(remade), drawing.tag()

    def init(front: tuple[int, ...]) -> Weights:
        square = (
            drawing.normal(size=(len(kinds), 2, *front, drawing.width, drawing.width))
            * 0.5
            * drawing.width**-0.5
        )
        first = [
            jnp.asarray(matrix, jnp.float32) for matrix in square.reshape(-1, *square.shape[2:])
        ]
        return [
            {"in": into, "out": out, "bias": into[..., 0, :]}
            for into, out in zip(first[::2], first[1::2], strict=True)
        ]

    def apply(weights: Weights, x: Array, at: Array) -> Array:
        early, key = x, jax.random.fold_in(jax.random.key(tag), at)
        for kind, weight in zip(kinds, weights, strict=True):
            weight = jax.tree.map(lambda leaf: leaf.astype(drawing.dtype), weight)
            x = LAYERS[kind](weight, x, early, key)
        return written(jnp.tanh(x))

    return Block(init, apply)


def _sequence(drawing: Drawing, depth: int, remade: bool) -> Block:
    parts = drawing.sides(depth - 1, 2, remade)
    return Block(
        lambda front: [part.init(front) for part in parts],
        lambda weights, x, at: parts[1].apply(weights[1], parts[0].apply(weights[0], x, at), at),
    )


def _scan(drawing: Drawing, depth: int, remade: bool) -> Block:
    """A scan over stacked weights, forwards or backwards; its stacked outputs are summed."""
    trips = drawing.draw.choice(_TRIPS)
    inner = drawing.block(depth - 1, remade)
    written = drawing.written(remade)
    reverse, unroll = drawing.draw.random() < 0.3, drawing.draw.choice((1, 1, 2))

    def apply(weights: Weights, x: Array, at: Array) -> Array:
        def body(x: Array, weight: Weights) -> tuple[Array, Array]:
            x = written(inner.apply(weight, x, at))
            return x, x.mean(0)

        x, means = lax.scan(body, x, weights, reverse=reverse, unroll=unroll)
        return x + means.sum(0)

    return Block(lambda front: inner.init((*front, trips)), apply)


def _fori(drawing: Drawing, depth: int, remade: bool) -> Block:
    """A loop with a fixed number of trips and the same weights, which jax differentiates."""
    trips = drawing.draw.choice(_TRIPS)
    inner = drawing.block(depth - 1, remade)
    written = drawing.written(remade)

    def apply(weights: Weights, x: Array, at: Array) -> Array:
        return lax.fori_loop(
            0, trips, lambda trip, x: written(inner.apply(weights, x, at + trip)), x
        )

    return Block(inner.init, apply)


def _while(drawing: Drawing, depth: int, remade: bool) -> Block:
    """A loop with a data-dependent number of trips, which jax does not differentiate."""
    limit = drawing.draw.choice(_TRIPS)
    inner = drawing.block(depth - 1, remade)
    written = drawing.written(remade)

    def apply(weights: Weights, x: Array, at: Array) -> Array:
        weights, start = lax.stop_gradient((weights, x))

        def goes_on(carry: tuple[Array, Array]) -> Array:
            trip, x = carry
            return (trip < limit) & ((trip < 1) | (jnp.abs(x[0, 0]) > 0.05))

        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            trip, x = carry
            return trip + 1, written(inner.apply(weights, x, at + trip))

        return x + lax.stop_gradient(lax.while_loop(goes_on, body, (jnp.int32(0), start))[1]) * 0.5

    return Block(inner.init, apply)


def _branches(count: int, drawing: Drawing, depth: int, remade: bool) -> Block:
    """`lax.cond` of two branches, or `lax.switch` of more."""
    sides, decided = drawing.sides(depth - 1, count, remade), drawing.decided()

    def apply(weights: Weights, x: Array, at: Array) -> Array:
        branches = [
            partial(side.apply, weight) for side, weight in zip(sides, weights, strict=True)
        ]
        index = decided(x, at) % count
        return (
            lax.cond(index == 1, *branches, x, at)
            if count == 2
            else lax.switch(index, branches, x, at)
        )

    return Block(lambda front: [side.init(front) for side in sides], apply)


def _checkpointed(drawing: Drawing, depth: int, remade: bool) -> Block:
    inner = drawing.block(depth - 1, remade=True)
    policy = drawing.draw.choice((None, jax.checkpoint_policies.dots_saveable))
    apply: Any = jax.checkpoint(inner.apply, policy=policy)
    return Block(inner.init, apply)


def _jitted(drawing: Drawing, depth: int, remade: bool) -> Block:
    inner = drawing.block(depth - 1, remade)
    return Block(inner.init, jax.jit(inner.apply))


_NESTS = (
    _scan, _scan, _scan, _fori, _fori, _while, partial(_branches, 2), partial(_branches, 2),
    partial(_branches, 3),
    _checkpointed, _jitted, _sequence,
)  # fmt: skip

Step = Callable[..., Any]
"""(state, batch) -> (state, loss)."""


def _scanned(step: Step, trips: int) -> Step:
    return lambda state, batches: lax.scan(step, state, batches)


def _repeated(step: Step, trips: int) -> Step:
    def steps(state: Any, batch: Array) -> Any:
        return lax.fori_loop(
            0, trips, lambda trip, carry: step(carry[0], batch), (state, jnp.float32(0))
        )

    return steps


def _until_small(step: Step, trips: int) -> Step:
    """At most `trips` training steps, until the loss is small."""

    def steps(state: Any, batch: Array) -> Any:
        def goes_on(carry: Any) -> Array:
            return (carry[0] < trips) & (carry[2] > 0.05)

        def body(carry: Any) -> Any:
            return carry[0] + 1, *step(carry[1], batch)

        return lax.while_loop(goes_on, body, (jnp.int32(0), state, jnp.float32(1)))[1:]

    return steps


def drawn_program(number: int) -> tuple[Step, tuple[Any, ...]]:
    """A training step and its arguments: a state (weights, moments, count), and its batches."""
    draw, normal = random.Random(number), np.random.default_rng(number).normal
    rows, width, dtype = 256, 16, draw.choice((jnp.float32, jnp.float32, jnp.bfloat16))
    drawing = Drawing(draw, normal, width, dtype, draw.choice((0, 0.3, 0.5, 0.7)))
    outer = draw.choice((None, None, None, _scanned, _repeated, _until_small))
    blocks = [drawing.block(0), drawing.block(DEPTH - (outer is not None))]
    draw.shuffle(blocks)
    momentum = draw.choice((0.0, 0.9))
    at_entry = drawing.written(False)
    at_end = drawing.written(False)

    def loss(weights: Weights, at: Array, batch: Array) -> Array:
        x = batch.astype(dtype)
        for block, weight in zip(blocks, weights, strict=True):
            x = block.apply(weight, x, at)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state: Any, batch: Array) -> Any:
        weights, moments, at = state
        value, gradients = jax.value_and_grad(loss)(weights, at, at_entry(batch))
        value = at_end(value.reshape(1, 1))[0, 0]
        if momentum:
            moments = gradients = jax.tree.map(
                lambda old, new: momentum * old + new, moments, gradients
            )
        weights = jax.tree.map(
            lambda weight, gradient: weight - _RATE * gradient, weights, gradients
        )
        return (weights, moments, at + 1), value

    weights = [block.init(()) for block in blocks]
    moments = jax.tree.map(jnp.zeros_like, weights) if momentum else ()
    trips = draw.choice((2, 3))
    batch = jnp.asarray(
        normal(size=(*((trips,) if outer is _scanned else ()), rows, width)), jnp.float32
    )
    return step if outer is None else outer(step, trips), ((weights, moments, jnp.int32(0)), batch)
