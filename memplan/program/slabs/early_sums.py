"""Compute sums along an axis as early as possible: fewer walls between loops over slabs.

A loop's sums are known only after the loop. A norm as users write it has two dependent sums: forward, the variance
needs the mean; backward, the gradient through the mean needs that through the variance. Each reads everything large
again. But squares about a mean can be accumulated together with the mean (`moments`), and a sum of products with a
factor that is known late equals that factor times a sum that is known early.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.program import compat
from memplan.program.flat import Flat, Writer, renamed
from memplan.program.ops import shape_of, squares_about_mean
from memplan.program.slabs.axis import SlabAxis

Written = Callable[[], Any]
"""Writes the equations of a value, once; returns the variable."""

_DEEPEST = 64  # nested equations to look through: a norm has four; Python's limit is a thousand calls


def early_sums(axis: SlabAxis) -> Flat:
    """The flat jaxpr of an axis, with the sums along it behind as few walls as linearity and moments allow.

    Results differ by rounding. Variables that remain are the same objects, so the axis can begin again at the same
    place.
    """
    writer = _Writer(axis)
    for number, eqn in enumerate(axis.flat.eqns):
        with compat.user_context(eqn):
            writer.add(number, eqn)
    return writer.done()


@dataclass
class _Levels:
    """The number of walls before each value, if every equation on the axis runs in a loop."""

    axis: SlabAxis
    by_slabs: dict[Any, int] = field(default_factory=dict)  # by variable, for an equation that reads it by slabs
    whole: dict[Any, int] = field(default_factory=dict)  # for any other equation

    def add(self, number: int, eqn: compat.JaxprEqn) -> None:
        along = self.axis.equations.get(number)
        sliced = along.sliced if along else ()
        reads = (
            (self.by_slabs if position in sliced else self.whole).get(atom, 0)
            for position, atom in enumerate(eqn.invars)
            if compat.is_var(atom)
        )
        level = max(reads, default=0)
        for var in eqn.outvars:
            self.whole[var] = level + (along is not None)
            self.by_slabs[var] = level + (along is not None and along.reduces)

    def known(self, var: Any, level: int) -> None:
        self.whole[var] = self.by_slabs[var] = level

    def of_whole(self, atom: Any) -> int:
        return self.whole.get(atom, 0) if compat.is_var(atom) else 0

    def of_sum(self, var: Any) -> int:
        """The level at which a sum along the axis is known, of a value on the axis or on none."""
        return self.by_slabs.get(var, 0) + 1 if var in self.axis.dims else self.whole.get(var, 0)


class _Writer(Writer):
    """The equations of the new jaxpr."""

    def __init__(self, axis: SlabAxis):
        super().__init__(axis.flat)
        self.axis, self.levels = axis, _Levels(axis)
        self.made: dict[Any, compat.JaxprEqn] = {}
        self.totals: dict[tuple[Any, Sum, Any], Any] = {}

    def add(self, number: int, eqn: compat.JaxprEqn) -> None:
        self.levels.add(number, eqn)
        earlier = self._earlier(number, eqn)
        if earlier is None:
            self.eqns.append(eqn)
            if eqn.primitive.name == "reduce_sum" and compat.is_var(eqn.invars[0]):
                total = Sum(shape_of(eqn.invars[0]), tuple(eqn.params["axes"]))
                self.totals[eqn.invars[0], total, compat.aval_of(eqn.outvars[0]).dtype] = eqn.outvars[0]
        else:
            level, write = earlier
            self._replace(eqn.outvars[0], write)
            self.levels.known(eqn.outvars[0], level)
        self.made.update((var, eqn) for var in eqn.outvars)

    def _earlier(self, number: int, eqn: compat.JaxprEqn) -> tuple[int, Written] | None:
        """The least level at which a sum along the axis can be known, and its writer; None if that gains nothing."""
        along = self.axis.equations.get(number)
        if eqn.primitive.name != "reduce_sum" or along is None or not along.reduces or along.sliced != (0,):
            return None
        if not jnp.issubdtype(compat.aval_of(eqn.invars[0]).dtype, jnp.floating):
            return None
        total, level = Sum(shape_of(eqn.invars[0]), tuple(eqn.params["axes"])), self.levels.whole[eqn.outvars[0]]
        return self._as_moments(eqn, total, level) or self._as_terms(eqn, total, level)

    def _as_moments(self, eqn: compat.JaxprEqn, total: Sum, level: int) -> tuple[int, Written] | None:
        root = squared(eqn.invars[0], self.made)
        x = None if root is None else centred(root, total, self.made)
        if x is None or x not in self.axis.dims or self.levels.of_sum(x) >= level:
            return None
        dim = self.axis.dims[x]
        counted = [total.shape[dim] if one == dim else 1 for one in range(len(total.shape))]

        def squares(x: Any) -> Any:
            return squares_about_mean(x, lax.full(counted, 1, x.dtype), total.axes)

        return self.levels.of_sum(x), lambda: self.write(squares, x)

    def _as_terms(self, eqn: compat.JaxprEqn, total: Sum, level: int) -> tuple[int, Written] | None:
        (summed,), dtype = eqn.invars, compat.aval_of(eqn.outvars[0]).dtype
        found = None
        for earlier in range(level - 1, -1, -1):
            terms = _Terms(self, total, self.axis.dims[summed], earlier, jnp.promote_types(dtype, jnp.float32))
            write = terms.of(summed)
            if write is None:
                break
            found = earlier, functools.partial(self._converted, write, dtype)
        return found

    def _converted(self, write: Written, dtype: Any) -> Any:
        return self.write(lambda x: lax.convert_element_type(x, dtype), write())

    def total(self, atom: Any, total: Sum, dtype: Any) -> Any:
        """The sum of an array, accumulated in this type; written if it does not exist yet."""
        key = atom, total, dtype
        if key not in self.totals:
            self.totals[key] = self.write(lambda x: total.of(lax.convert_element_type(x, dtype)), atom)
        return self.totals[key]

    def _replace(self, var: Any, write: Written) -> None:
        """Write a value, and name its result as the variable that others read."""
        first, made = len(self.eqns), write()
        if not any(made is one for eqn in self.eqns[first:] for one in eqn.outvars):
            made = self.write(jnp.copy, made)
        self.totals = {key: renamed({made: var}, one) for key, one in self.totals.items()}
        self.define(var, made, first)


@dataclass(frozen=True)
class _Terms:
    """A sum along the axis from values known at a level: term by term, or factor by factor."""

    writer: _Writer
    total: Sum
    dim: int  # the axis
    level: int
    dtype: Any  # the type of the accumulation
    found: dict[Any, Written | None] = field(default_factory=dict)

    def of(self, atom: Any, depth: int = 0) -> Written | None:
        """The sum of an array; None if it is not known at the level."""
        if not compat.is_var(atom):
            return self._of_one(atom)
        if atom not in self.found:
            self.found[atom] = self._of_one(atom) or self._of_known(atom) or self._of_terms(atom, depth + 1)
        return self.found[atom]

    def one(self, atom: Any) -> Written | None:
        """The common factor of all elements of a sum."""
        broadcast = broadcast_of(atom, self.total, self.writer.made)
        if broadcast is None or self.writer.levels.of_whole(broadcast.source) > self.level:
            return None

        def thin(x: Any) -> Any:
            return lax.convert_element_type(broadcast.thin(x, self.total), self.dtype)

        return functools.cache(lambda: self.writer.write(thin, broadcast.source))

    def _of_one(self, atom: Any) -> Written | None:
        one = self.one(atom)
        return None if one is None else self._written(lambda x: x * float(self.total.times(())), one)

    def _of_known(self, var: Any) -> Written | None:
        levels = self.writer.levels
        on_axis = levels.axis.dims.get(var, self.dim) == self.dim
        if not on_axis or levels.of_sum(var) > self.level or len(shape_of(var)) != len(self.total.shape):
            return None
        return lambda: self.writer.total(var, self.total, self.dtype)

    def _of_terms(self, var: Any, depth: int) -> Written | None:
        eqn = self.writer.made.get(var)
        if eqn is None or depth > _DEEPEST or not jnp.issubdtype(compat.aval_of(var).dtype, jnp.floating):
            return None
        of, first, *rest = functools.partial(self.of, depth=depth), *eqn.invars
        match eqn.primitive.name:
            case "neg":
                return self._written(lax.neg, of(first))
            case "convert_element_type" if is_widening(eqn):
                return of(first)
            case "add" | "add_any":
                return self._written(lax.add, of(first), of(rest[0]))
            case "sub":
                return self._written(lax.sub, of(first), of(rest[0]))
            case "div":
                return self._written(lax.div, of(first), self.one(rest[0]))
            case "mul":
                return self._written(lax.mul, of(first), self.one(rest[0])) or self._written(
                    lax.mul, self.one(first), of(rest[0])
                )
        return None

    def _written(self, function: Callable[..., Any], *operands: Written | None) -> Written | None:
        given = [operand for operand in operands if operand is not None]
        if len(given) < len(operands):
            return None
        return functools.cache(lambda: self.writer.write(function, *(operand() for operand in given)))


Made = Mapping[Any, compat.JaxprEqn]
"""The equation that makes each variable."""


@dataclass(frozen=True)
class Sum:
    """A sum over some dimensions of arrays of one shape, or of values broadcast to it."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.axes)

    @property
    def result(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.kept)

    def times(self, shape: Sequence[int]) -> int:
        """The number of times that an element of this shape is added."""
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
    dims: tuple[int, ...]  # for each dimension of the source, the array's dimension; summed dimensions have one element

    def thin(self, x: Any, total: Sum) -> Any:
        """The source in the shape of the sum's result: the factor of every element, or the element itself."""
        x = lax.squeeze(x, [at for at, dim in enumerate(self.dims) if dim in total.axes])
        dims = [total.kept.index(dim) for dim in self.dims if dim not in total.axes]
        return lax.broadcast_in_dim(x, total.result, dims)


def broadcast_of(atom: Any, total: Sum, made: Made) -> Broadcast | None:
    """The source that an array or a scalar is broadcast from; None if it differs along a summed dimension."""
    eqn = made.get(atom) if compat.is_var(atom) else None
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and len(shape_of(atom)) == len(total.shape):
        found = Broadcast(eqn.invars[0], tuple(map(int, eqn.params["broadcast_dimensions"])))
    else:
        found = Broadcast(atom, tuple(range(len(shape_of(atom)))))
    sizes = zip(found.dims, shape_of(found.source), strict=True)
    return found if all(size == 1 for dim, size in sizes if dim in total.axes) else None


def centred(atom: Any, total: Sum, made: Made) -> Any | None:
    """The array whose mean over the summed dimensions was subtracted."""
    eqn = _maker(atom, made)
    if eqn is None or eqn.primitive.name != "sub":
        return None
    left, right = eqn.invars
    return next((x for x, mean in ((left, right), (right, left)) if _is_mean(mean, x, total, made)), None)


def squared(atom: Any, made: Made) -> Any | None:
    """The array whose square this is."""
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
    """A mean: a sum of x over the same dimensions, divided by their size, with as many dimensions as x."""
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
    """The factor by which an equation multiplies its one operand, if it otherwise only reshapes it."""
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
