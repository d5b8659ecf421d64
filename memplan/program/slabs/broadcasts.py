"""Which arrays are broadcasts along some dimensions, of what, and which of them are means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.program import compat
from memplan.program.ops import shape_of

Made = Mapping[Any, compat.JaxprEqn]
"""By variable, the equation that makes it."""


@dataclass(frozen=True)
class Sum:
    """A sum over some dimensions of arrays of a shape, or of what is broadcast to it, number by number."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.axes)

    @property
    def result(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.kept)

    def times(self, shape: Sequence[int]) -> int:
        """How often an element of this shape is summed."""
        if not shape:
            return math.prod(self.shape[dim] for dim in self.axes)
        return math.prod(self.shape[dim] // shape[dim] for dim in self.axes)

    def of(self, x: Any) -> Any:
        """The sum of an array with as many dimensions."""
        total = lax.reduce_sum(x, self.axes)
        total = lax.broadcast_in_dim(total, self.result, tuple(range(len(self.result))))
        times = self.times(x.shape)
        return total * float(times) if times > 1 else total


@dataclass(frozen=True)
class Broadcast:
    """The source that an array is broadcast from, at least along the dimensions that are summed over."""

    source: Any
    dims: tuple[int, ...]  # for each dimension of the source, that of the array; those summed over have one element

    def thin(self, x: Any, total: Sum) -> Any:
        """The source as the sum's result is shaped: what every element that is summed is multiplied by, or is."""
        x = lax.squeeze(x, [at for at, dim in enumerate(self.dims) if dim in total.axes])
        dims = [total.kept.index(dim) for dim in self.dims if dim not in total.axes]
        return lax.broadcast_in_dim(x, total.result, dims)


def broadcast_of(atom: Any, total: Sum, made: Made) -> Broadcast | None:
    """The source that an array or a scalar is broadcast from; None where it differs along a summed dimension."""
    eqn = made.get(atom) if compat.is_var(atom) else None
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and len(shape_of(atom)) == len(total.shape):
        found = Broadcast(eqn.invars[0], tuple(map(int, eqn.params["broadcast_dimensions"])))
    else:
        found = Broadcast(atom, tuple(range(len(shape_of(atom)))))
    sizes = zip(found.dims, shape_of(found.source), strict=True)
    return found if all(size == 1 for dim, size in sizes if dim in total.axes) else None


def centred(atom: Any, total: Sum, made: Made) -> Any | None:
    """The array whose mean, over what is summed over, was subtracted from it."""
    eqn = _maker(atom, made)
    if eqn is None or eqn.primitive.name != "sub":
        return None
    left, right = eqn.invars
    return next((x for x, mean in ((left, right), (right, left)) if _is_mean(mean, x, total, made)), None)


def squared(atom: Any, made: Made) -> Any | None:
    """What an array is the square of."""
    eqn = _maker(atom, made)
    if eqn is None:
        return None
    name, factors = eqn.primitive.name, eqn.invars
    twice = name == "mul" and factors[0] is factors[1]
    return factors[0] if name == "square" or twice or (name == "integer_pow" and eqn.params["y"] == 2) else None


def is_widening(eqn: compat.JaxprEqn) -> bool:
    """A conversion of floats that rounds nothing."""
    before, after = compat.aval_of(eqn.invars[0]).dtype, compat.aval_of(eqn.outvars[0]).dtype
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) == after


def _maker(atom: Any, made: Made) -> compat.JaxprEqn | None:
    return made.get(atom) if compat.is_var(atom) else None


def _is_mean(atom: Any, x: Any, total: Sum, made: Made) -> bool:
    """A sum of x over the same dimensions, divided by how many it sums, and given as many dimensions as x again."""
    broadcast = broadcast_of(atom, total, made)
    if broadcast is None or shape_of(x) != total.shape or not compat.is_var(x):
        return False
    value, scale = broadcast.source, 1.0
    if _sizes(value) != [size for size in total.result if size > 1]:
        return False
    while (eqn := _maker(value, made)) is not None and eqn.primitive.name != "reduce_sum":
        factor = _factor(eqn)
        if factor is None:
            return False
        value, scale = next(filter(compat.is_var, eqn.invars)), scale * factor
    if eqn is None or eqn.invars[0] is not x or set(eqn.params["axes"]) != set(total.axes):
        return False
    return math.isclose(scale * total.times(()), 1.0, rel_tol=1e-6)  # of 1 / count in float32


def _factor(eqn: compat.JaxprEqn) -> float | None:
    """By what number an equation multiplies all elements of its one operand, if it does nothing else but reshape."""
    match eqn.primitive.name:
        case "reshape" | "squeeze" | "broadcast_in_dim":
            return 1.0 if _sizes(eqn.invars[0]) == _sizes(eqn.outvars[0]) else None
        case "convert_element_type":
            return 1.0 if is_widening(eqn) else None
        case "div" | "mul" as name:
            return _of_literal(eqn, name)
    return None


def _of_literal(eqn: compat.JaxprEqn, name: str) -> float | None:
    left, right = eqn.invars
    literal = next((atom for atom in (right, left) if not compat.is_var(atom) and not shape_of(atom)), None)
    if literal is None or (name == "div" and literal is left):
        return None
    number = float(compat.value_of(literal))
    return number if name == "mul" else 1 / number if number else None


def _sizes(atom: Any) -> list[int]:
    return [size for size in shape_of(atom) if size > 1]
