"""Compute sums along an axis as early as possible, so that fewer walls separate loops over slabs.

A loop's sums are known only after the loop. A norm as users write it has two dependent sums:
forward, the variance needs the mean; backward, the gradient through the mean needs the one through
the variance. Each sum reads everything large again. But squares about a mean can be accumulated
together with the mean (`moments`), and a sum of products with a factor that is known late equals
that factor times a sum that is known early.
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
from memplan.program.flat import EquationWriter, Flat, renamed
from memplan.program.ops import shape_of, squares_about_mean
from memplan.program.slabs.axis import SlabAxis

WriteValue = Callable[[], Any]
"""Writes the equations of a value once, and returns its variable."""

# Look through at most so many nested equations. A norm has four; Python's limit is a thousand
# calls.
_MAX_DEPTH = 64


def early_sums(axis: SlabAxis) -> Flat:
    """The flat jaxpr of an axis with its sums behind as few walls as linearity and moments allow.

    Results differ by rounding. Variables that remain are the same objects, so the axis can be
    followed again from the same variable.
    """
    writer = _EarlySumWriter(axis)
    for number, eqn in enumerate(axis.flat.eqns):
        with compat.user_context(eqn):
            writer.add(number, eqn)
    return writer.done()


@dataclass
class _Levels:
    """The number of walls before each value, if every equation on the axis runs in a loop."""

    axis: SlabAxis
    # variable -> walls before an equation that reads it by slabs
    by_slabs: dict[Any, int] = field(default_factory=dict)
    # variable -> walls before an equation that reads it whole
    whole: dict[Any, int] = field(default_factory=dict)

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

    def set_level(self, var: Any, level: int) -> None:
        """Set the number of walls before a value that is computed earlier."""
        self.whole[var] = self.by_slabs[var] = level

    def of_whole(self, atom: Any) -> int:
        """The level at which a whole array is known."""
        return self.whole.get(atom, 0) if compat.is_var(atom) else 0

    def of_sum(self, var: Any) -> int:
        """The level at which the sum of an array along the axis is known."""
        return self.by_slabs.get(var, 0) + 1 if var in self.axis.dims else self.whole.get(var, 0)


class _EarlySumWriter(EquationWriter):
    """Writes the jaxpr with early sums.

    Attributes:
      equations: variable of the old jaxpr -> its equation.
      totals: (array, sum, type of the accumulation) -> the variable of a sum that is written.
    """

    def __init__(self, axis: SlabAxis):
        super().__init__(axis.flat)
        self.axis, self.levels = axis, _Levels(axis)
        self.equations: dict[Any, compat.JaxprEqn] = {}
        self.totals: dict[tuple[Any, Sum, Any], Any] = {}

    def add(self, number: int, eqn: compat.JaxprEqn) -> None:
        """Write an equation, or an earlier form of it."""
        self.levels.add(number, eqn)
        earlier = self._earlier(number, eqn)
        if earlier is None:
            self.eqns.append(eqn)
            if eqn.primitive.name == "reduce_sum" and compat.is_var(eqn.invars[0]):
                total = Sum(shape_of(eqn.invars[0]), tuple(eqn.params["axes"]))
                dtype = compat.aval_of(eqn.outvars[0]).dtype
                self.totals[eqn.invars[0], total, dtype] = eqn.outvars[0]
        else:
            level, write = earlier
            self._replace(eqn.outvars[0], write)
            self.levels.set_level(eqn.outvars[0], level)
        self.equations.update((var, eqn) for var in eqn.outvars)

    def _earlier(self, number: int, eqn: compat.JaxprEqn) -> tuple[int, WriteValue] | None:
        """The lowest level at which a sum can be known, and its writer; None without a gain."""
        along = self.axis.equations.get(number)
        if eqn.primitive.name != "reduce_sum" or along is None:
            return None
        if not along.reduces or along.sliced != (0,):
            return None
        if not jnp.issubdtype(compat.aval_of(eqn.invars[0]).dtype, jnp.floating):
            return None
        total = Sum(shape_of(eqn.invars[0]), tuple(eqn.params["axes"]))
        level = self.levels.whole[eqn.outvars[0]]
        return self._as_moments(eqn, total, level) or self._as_terms(eqn, total, level)

    def _as_moments(
        self,
        eqn: compat.JaxprEqn,
        total: Sum,
        level: int,
    ) -> tuple[int, WriteValue] | None:
        """The sum of squares about a mean, accumulated with the mean."""
        root = squared(eqn.invars[0], self.equations)
        x = None if root is None else centred(root, total, self.equations)
        if x is None or x not in self.axis.dims or self.levels.of_sum(x) >= level:
            return None
        dim = self.axis.dims[x]
        counts_shape = [1] * len(total.shape)
        counts_shape[dim] = total.shape[dim]

        def squares(x: Any) -> Any:
            return squares_about_mean(x, lax.full(counts_shape, 1, x.dtype), total.axes)

        return self.levels.of_sum(x), lambda: self.write(squares, x)

    def _as_terms(
        self,
        eqn: compat.JaxprEqn,
        total: Sum,
        level: int,
    ) -> tuple[int, WriteValue] | None:
        """The sum from sums of terms and factors, at the lowest level."""
        (summed,) = eqn.invars
        dtype = compat.aval_of(eqn.outvars[0]).dtype
        earliest = None
        for earlier in range(level - 1, -1, -1):
            wide = jnp.promote_types(dtype, jnp.float32)
            terms = _Terms(self, total, self.axis.dims[summed], earlier, wide)
            write = terms.of(summed)
            if write is None:
                break
            earliest = earlier, functools.partial(self._converted, write, dtype)
        return earliest

    def _converted(self, write: WriteValue, dtype: Any) -> Any:
        return self.write(lambda x: lax.convert_element_type(x, dtype), write())

    def total(self, atom: Any, total: Sum, dtype: Any) -> Any:
        """The sum of an array, accumulated in this type; written only once."""
        key = atom, total, dtype
        if key not in self.totals:
            self.totals[key] = self.write(
                lambda x: total.of(lax.convert_element_type(x, dtype)),
                atom,
            )
        return self.totals[key]

    def _replace(self, var: Any, write: WriteValue) -> None:
        """Write a value, and give its result the name of a variable of the old jaxpr."""
        first = len(self.eqns)
        result = write()
        written = [outvar for eqn in self.eqns[first:] for outvar in eqn.outvars]
        if not any(result is outvar for outvar in written):
            result = self.write(jnp.copy, result)
        new_name = {result: var}
        self.totals = {key: renamed(new_name, total) for key, total in self.totals.items()}
        self.define(var, result, first)


@dataclass(frozen=True)
class _Terms:
    """Computes a sum along the axis from values that are known at a level."""

    writer: _EarlySumWriter
    total: Sum
    dim: int  # the summed array's dimension on the axis
    level: int
    dtype: Any  # the type of the accumulation
    # variable -> how to write its sum; None if the sum is not known at the level
    writers: dict[Any, WriteValue | None] = field(default_factory=dict)

    def of(self, atom: Any, depth: int = 0) -> WriteValue | None:
        """The sum of an array; None if it is not known at the level."""
        if not compat.is_var(atom):
            return self._of_factor(atom)
        if atom not in self.writers:
            self.writers[atom] = (
                self._of_factor(
                    atom,
                )
                or self._of_available(atom)
                or self._of_terms(atom, depth + 1)
            )
        return self.writers[atom]

    def factor(self, atom: Any) -> WriteValue | None:
        """The common factor of all elements of a sum; None if it is not known at the level."""
        broadcast = broadcast_of(atom, self.total, self.writer.equations)
        if broadcast is None or self.writer.levels.of_whole(broadcast.source) > self.level:
            return None

        def thin(x: Any) -> Any:
            return lax.convert_element_type(broadcast.thin(x, self.total), self.dtype)

        return functools.cache(lambda: self.writer.write(thin, broadcast.source))

    def _of_factor(self, atom: Any) -> WriteValue | None:
        """The sum of equal elements."""
        factor = self.factor(atom)
        if factor is None:
            return None
        return self._written(lambda x: x * float(self.total.times(())), factor)

    def _of_available(self, var: Any) -> WriteValue | None:
        """The sum of an array, if that is known at the level."""
        levels = self.writer.levels
        if levels.axis.dims.get(var, self.dim) != self.dim or levels.of_sum(var) > self.level:
            return None
        if len(shape_of(var)) != len(self.total.shape):
            return None
        return lambda: self.writer.total(var, self.total, self.dtype)

    def _of_terms(self, var: Any, depth: int) -> WriteValue | None:
        """The sum of an equation's result, by linearity in its operands."""
        eqn = self.writer.equations.get(var)
        if eqn is None or depth > _MAX_DEPTH:
            return None
        if not jnp.issubdtype(compat.aval_of(var).dtype, jnp.floating):
            return None
        sum_of = functools.partial(self.of, depth=depth)
        first, *remaining = eqn.invars
        match eqn.primitive.name:
            case "neg":
                return self._written(lax.neg, sum_of(first))
            case "convert_element_type" if is_widening(eqn):
                return sum_of(first)
            case "add" | "add_any":
                return self._written(lax.add, sum_of(first), sum_of(remaining[0]))
            case "sub":
                return self._written(lax.sub, sum_of(first), sum_of(remaining[0]))
            case "div":
                return self._written(lax.div, sum_of(first), self.factor(remaining[0]))
            case "mul":
                factor_last = self._written(lax.mul, sum_of(first), self.factor(remaining[0]))
                if factor_last is not None:
                    return factor_last
                return self._written(lax.mul, self.factor(first), sum_of(remaining[0]))
        return None

    def _written(
        self,
        function: Callable[..., Any],
        *operands: WriteValue | None,
    ) -> WriteValue | None:
        """A function of values that can be written; None if one of them cannot."""
        writers = [write for write in operands if write is not None]
        if len(writers) < len(operands):
            return None
        return functools.cache(lambda: self.writer.write(function, *(write() for write in writers)))


Equations = Mapping[Any, compat.JaxprEqn]
"""variable -> the equation that makes it"""


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
        """How often an element of an array of this shape is added."""
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
    """The source from which an array is broadcast, at least along the summed dimensions."""

    source: Any
    # for each dimension of the source, the array's dimension; summed dimensions have one element
    dims: tuple[int, ...]

    def thin(self, x: Any, total: Sum) -> Any:
        """The source in the shape of the sum's result."""
        summed = [position for position, dim in enumerate(self.dims) if dim in total.axes]
        x = lax.squeeze(x, summed)
        dims = [total.kept.index(dim) for dim in self.dims if dim not in total.axes]
        return lax.broadcast_in_dim(x, total.result, dims)


def broadcast_of(atom: Any, total: Sum, equations: Equations) -> Broadcast | None:
    """The source of a broadcast array or scalar; None if it varies along a summed dimension."""
    eqn = _maker(atom, equations)
    is_broadcast = eqn is not None and eqn.primitive.name == "broadcast_in_dim"
    if eqn is not None and is_broadcast and len(shape_of(atom)) == len(total.shape):
        broadcast = Broadcast(eqn.invars[0], tuple(map(int, eqn.params["broadcast_dimensions"])))
    else:
        broadcast = Broadcast(atom, tuple(range(len(shape_of(atom)))))
    sizes = zip(broadcast.dims, shape_of(broadcast.source), strict=True)
    return broadcast if all(size == 1 for dim, size in sizes if dim in total.axes) else None


def centred(atom: Any, total: Sum, equations: Equations) -> Any | None:
    """The array `x` if `atom` is `x - mean(x)` over the summed dimensions, else None."""
    eqn = _maker(atom, equations)
    if eqn is None or eqn.primitive.name != "sub":
        return None
    lhs, rhs = eqn.invars
    for x, mean in ((lhs, rhs), (rhs, lhs)):
        if _is_mean(mean, x, total, equations):
            return x
    return None


def squared(atom: Any, equations: Equations) -> Any | None:
    """The array `x` if `atom` is its square, else None."""
    eqn = _maker(atom, equations)
    if eqn is None:
        return None
    name, factors = eqn.primitive.name, eqn.invars
    is_product = name == "mul" and factors[0] is factors[1]
    is_power = name == "integer_pow" and eqn.params["y"] == 2
    return factors[0] if name == "square" or is_product or is_power else None


def is_widening(eqn: compat.JaxprEqn) -> bool:
    """Does a conversion of floats round nothing?"""
    before, after = compat.aval_of(eqn.invars[0]).dtype, compat.aval_of(eqn.outvars[0]).dtype
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) == after


def _maker(atom: Any, equations: Equations) -> compat.JaxprEqn | None:
    return equations.get(atom) if compat.is_var(atom) else None


def _is_mean(atom: Any, x: Any, total: Sum, equations: Equations) -> bool:
    """Is `atom` the mean of x over the summed dimensions, with as many dimensions as x?"""
    broadcast = broadcast_of(atom, total, equations)
    if broadcast is None or shape_of(x) != total.shape or not compat.is_var(x):
        return False
    value = broadcast.source
    scale = 1.0
    if _sizes(value) != [size for size in total.result if size > 1]:
        return False
    while (eqn := _maker(value, equations)) is not None and eqn.primitive.name != "reduce_sum":
        factor = _factor(eqn)
        if factor is None:
            return False
        value = next(filter(compat.is_var, eqn.invars))
        scale *= factor
    if eqn is None or eqn.invars[0] is not x or set(eqn.params["axes"]) != set(total.axes):
        return False
    # `scale` is 1 / count in float32
    return math.isclose(scale * total.times(()), 1.0, rel_tol=1e-6)


def _factor(eqn: compat.JaxprEqn) -> float | None:
    """The factor by which an equation multiplies its one operand; None if it does more."""
    match eqn.primitive.name:
        case "reshape" | "squeeze" | "broadcast_in_dim":
            return 1.0 if _sizes(eqn.invars[0]) == _sizes(eqn.outvars[0]) else None
        case "convert_element_type":
            return 1.0 if is_widening(eqn) else None
        case "div" | "mul" as name:
            return _of_literal(eqn, name)
    return None


def _of_literal(eqn: compat.JaxprEqn, name: str) -> float | None:
    lhs, rhs = eqn.invars
    literals = (atom for atom in (rhs, lhs) if not compat.is_var(atom) and not shape_of(atom))
    literal = next(literals, None)
    if literal is None or (name == "div" and literal is lhs):
        return None
    number = float(compat.value_of(literal))
    if name == "mul":
        return number
    return 1 / number if number else None


def _sizes(atom: Any) -> list[int]:
    """The sizes of an array's dimensions, without ones."""
    return [size for size in shape_of(atom) if size > 1]
