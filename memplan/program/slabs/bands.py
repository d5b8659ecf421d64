"""Rewrite products with constant banded matrices as `banded`, so that slabs can follow the rows of a resized image.

jax resizes by products with matrices, or by gathering rows, and computes the weights and row numbers in the step. They
depend on no argument, so they can be evaluated in advance: if each row of the result reads few rows, near its own, the
equation becomes `banded`. So do the equations of the gradient: products with the transposed matrix, and scatter-adds.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memplan.program import compat
from memplan.program.flat import Flat, Writer
from memplan.program.interpret import interpret_eqns
from memplan.program.ops import MOST_TAPS, Band, banded, shape_of

_LARGEST = 2**28  # elements of a matrix that is evaluated: 1 GiB of float32, in five seconds
_MOST_NUMBERS = 2**20  # of row indices


def with_bands(flat: Flat) -> Flat:
    """The flat jaxpr with `banded` instead of products with banded constants and of constant gathers and scatter-adds.

    Results differ by rounding. Variables that remain are the same objects.
    """
    writer = Writer(flat)
    constants = _Constants({var: value for var, value in compat.consts_of(flat.closed) if not compat.is_key(value)})
    changed = False
    for eqn in flat.eqns:
        constants.add(eqn)
        rule = _RULES.get(eqn.primitive.name)
        with compat.user_context(eqn):
            resized = rule(eqn, constants) if rule else None
            if resized is None:
                writer.eqns.append(eqn)
            else:
                resized.write(eqn, writer)
                changed = True
    return writer.done() if changed else flat


@dataclass(frozen=True)
class _Resized:
    """An equation that computes rows of its result from rows of an operand."""

    band: Band  # the matrix
    source: int  # position of the operand whose dimension `dim` is resized
    dim: int
    to: int  # the dimension of the result
    more: int | None = None  # position of an operand that is added to the result

    def write(self, eqn: compat.JaxprEqn, writer: Writer) -> None:
        band, (out,) = self.band, eqn.outvars

        def function(x: Any, *others: Any) -> Any:
            weights, *more = (None, *others) if band.takes else others
            made = banded(x, weights, self.dim, band.rows, band.weights.shape[0], compat.aval_of(out).dtype)
            order = [dim for dim in range(made.ndim) if dim != self.dim]
            order.insert(self.to, self.dim)
            made = made if order == sorted(order) else lax.transpose(made, order)
            return lax.add(more[0], made) if more else made

        weights = () if band.takes else (band.weights,)
        more = () if self.more is None else (eqn.invars[self.more],)
        first = len(writer.eqns)
        writer.define(out, writer.write(function, eqn.invars[self.source], *weights, *more), first)


Elements = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of the nonzero elements of a matrix."""


@dataclass(frozen=True)
class _Constants:
    """Variables that depend on no argument."""

    values: Mapping[Any, Any]  # constants of the jaxpr
    made: dict[Any, compat.JaxprEqn] = field(default_factory=dict)  # other constant variables, with their equations
    elements: dict[Any, Elements | None] = field(default_factory=dict)  # of evaluated matrices

    def __contains__(self, atom: Any) -> bool:
        return compat.is_var(atom) and (atom in self.made or atom in self.values)

    def add(self, eqn: compat.JaxprEqn) -> None:
        if not eqn.effects and all(atom in self or not compat.is_var(atom) for atom in eqn.invars):
            self.made.update((var, eqn) for var in eqn.outvars)

    def value(self, var: Any) -> np.ndarray:
        """Compile and run the equations of a constant."""
        eqns, wanted = list[compat.JaxprEqn](), {var}
        for one, eqn in reversed([*self.made.items()]):
            if one in wanted and (not eqns or eqns[-1] is not eqn):
                eqns.append(eqn)
                wanted.update(filter(compat.is_var, eqn.invars))
        known = [one for one in self.values if one in wanted]
        values = [np.asarray(self.values[one]) for one in known]

        def function(values: list[Any]) -> Any:
            return interpret_eqns(eqns[::-1], dict(zip(known, values, strict=True)), [var])[0]

        with _on_cpu():  # compiled ahead of time, so that a surrounding trace does not trace it
            return np.asarray(jax.jit(function).lower(values).compile()(values))

    def elements_of(self, var: Any) -> Elements | None:
        """The nonzero elements of a matrix; None if there are more than a band has."""
        if var not in self.elements:
            matrix = self.value(var)
            self.elements[var] = None
            if np.count_nonzero(matrix) <= MOST_TAPS * max(matrix.shape):
                rows, columns = np.nonzero(matrix)
                self.elements[var] = rows, columns, matrix[rows, columns]
        return self.elements[var]


def _product(eqn: compat.JaxprEqn, constants: _Constants) -> _Resized | None:
    """A product with a constant matrix, contracted over one of its dimensions."""
    contracted, batch = eqn.params["dimension_numbers"]
    constant = [atom in constants for atom in eqn.invars]
    if sum(constant) != 1 or batch[0] or len(contracted[0]) != 1:
        return None
    at = constant.index(True)
    matrix, x = eqn.invars[at], 1 - at
    if len(shape_of(matrix)) != 2 or not all(map(_is_real, (*eqn.invars, *eqn.outvars))):
        return None
    band = _band(matrix, constants, 1 - contracted[at][0])
    to = 0 if at == 0 else len(shape_of(eqn.outvars[0])) - 1
    return None if band is None else _Resized(band, x, contracted[x][0], to)


def _picked(eqn: compat.JaxprEqn, constants: _Constants) -> _Resized | None:
    """A gather of rows by constant indices, one for each row of the result."""
    numbers, (x, indices) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
    gone = numbers.collapsed_slice_dims
    sizes = [1 if dim in gone else size for dim, size in enumerate(x)]
    one_by_one = len(indices) == 2 and len(gone) == 1 and numbers.start_index_map == gone
    if not one_by_one or numbers.operand_batching_dims or list(eqn.params["slice_sizes"]) != sizes:
        return None
    (dim,), rows = gone, _numbers(eqn.invars[1], constants, x[gone[0]])
    if rows is None:
        return None
    band = Band.of((len(rows), x[dim]), np.arange(len(rows)), rows, np.ones(len(rows), np.float32))
    to = next(one for one in range(len(x)) if one not in numbers.offset_dims)
    return None if band is None or not band.takes else _Resized(band, 0, dim, to)


def _added(eqn: compat.JaxprEqn, constants: _Constants) -> _Resized | None:
    """A scatter-add of rows by constant indices."""
    numbers, (x, indices, updates) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
    inserted = numbers.inserted_window_dims
    one_by_one = len(indices) == 2 and len(inserted) == 1 and numbers.scatter_dims_to_operand_dims == inserted
    if not one_by_one or numbers.operand_batching_dims or not _is_real(eqn.outvars[0]):
        return None
    (to,) = inserted
    dim = next(one for one in range(len(updates)) if one not in numbers.update_window_dims)
    if [*updates[:dim], *updates[dim + 1 :]] != [*x[:to], *x[to + 1 :]]:
        return None
    rows = _numbers(eqn.invars[1], constants, x[to])
    if rows is None:
        return None
    band = Band.of((x[to], len(rows)), rows, np.arange(len(rows)), np.ones(len(rows), np.float32))
    return None if band is None else _Resized(band, 2, dim, to, more=0)


_RULES: dict[str, Callable[[compat.JaxprEqn, _Constants], _Resized | None]] = {
    "dot_general": _product,
    "gather": _picked,
    "scatter-add": _added,
}


def _is_real(atom: Any) -> bool:
    return jnp.issubdtype(compat.aval_of(atom).dtype, jnp.floating)


def _band(matrix: Any, constants: _Constants, dim: int) -> Band | None:
    """The band of a constant matrix, whose dimension `dim` is the result's."""
    shape = shape_of(matrix)
    elements = constants.elements_of(matrix) if math.prod(shape) <= _LARGEST else None
    if elements is None:
        return None
    *places, values = elements
    return Band.of((shape[dim], shape[1 - dim]), places[dim], places[1 - dim], values)


def _numbers(indices: Any, constants: _Constants, size: int) -> np.ndarray | None:
    """Constant row numbers (n, 1) into an array with this many rows; None if one is out of range."""
    shape = shape_of(indices)
    if indices not in constants or shape[1:] != (1,) or shape[0] > _MOST_NUMBERS:
        return None
    numbers = constants.value(indices)[:, 0].astype(np.int64)
    return numbers if ((numbers >= 0) & (numbers < size)).all() else None


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """On the CPU if jax has one, since a matrix may be larger than the free device memory."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
