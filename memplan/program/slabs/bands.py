"""Rewrite products with constant banded matrices, so that slabs can follow a resized image.

jax resizes by products with matrices, or by gathering rows, and computes the weights and row
numbers in the step. These depend on no argument, so they can be evaluated in advance. If each row
of the result reads a few rows near its own, the equation becomes `banded`. So do the equations of
the gradient: products with the transposed matrix, and scatter-adds.
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
from memplan.program.flat import EquationWriter, Flat
from memplan.program.interpret import interpret_eqns
from memplan.program.ops import MOST_TAPS, Band, banded, shape_of

# Evaluate matrices of at most so many elements: 1 GiB of float32, which takes five seconds.
_MOST_ELEMENTS = 2**28
# Evaluate at most so many row numbers of a gather or scatter-add.
_MOST_ROW_NUMBERS = 2**20


def with_bands(flat: Flat) -> Flat:
    """Replace products with banded constants, and constant gathers and scatter-adds, by `banded`.

    Results differ by rounding. Variables that remain are the same objects.
    """
    writer = EquationWriter(flat)
    consts = compat.consts_of(flat.closed)
    constants = _Constants({var: value for var, value in consts if not compat.is_key(value)})
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
    source: int  # position of the resized operand
    dim: int  # the operand's resized dimension
    to: int  # the result's resized dimension
    addend: int | None = None  # position of an operand that is added to the result

    def write(self, eqn: compat.JaxprEqn, writer: EquationWriter) -> None:
        """Write the equation as `banded`."""
        band = self.band
        (out,) = eqn.outvars
        has_addend = self.addend is not None

        def function(x: Any, *operands: Any) -> Any:
            weights, *addends = (None, *operands) if band.takes else operands
            dtype = compat.aval_of(out).dtype
            result = banded(x, weights, self.dim, band.rows, band.weights.shape[0], dtype)
            order = [dim for dim in range(result.ndim) if dim != self.dim]
            order.insert(self.to, self.dim)
            if order != sorted(order):
                result = lax.transpose(result, order)
            return lax.add(addends[0], result) if has_addend else result

        weights = () if band.takes else (band.weights,)
        addends = () if self.addend is None else (eqn.invars[self.addend],)
        first = len(writer.eqns)
        result = writer.write(function, eqn.invars[self.source], *weights, *addends)
        writer.define(out, result, first)


Elements = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of the nonzero elements of a matrix."""


@dataclass(frozen=True)
class _Constants:
    """Variables that depend on no argument."""

    values: Mapping[Any, Any]  # constants of the jaxpr
    # other constant variables -> their equations
    equations: dict[Any, compat.JaxprEqn] = field(default_factory=dict)
    # evaluated matrices -> their nonzero elements; None if there are more than a band has
    elements: dict[Any, Elements | None] = field(default_factory=dict)

    def __contains__(self, atom: Any) -> bool:
        return compat.is_var(atom) and (atom in self.equations or atom in self.values)

    def add(self, eqn: compat.JaxprEqn) -> None:
        """Add the results of an equation if all its operands are constant."""
        is_pure = not eqn.effects and not compat.communicates(eqn)
        if is_pure and all(atom in self or not compat.is_var(atom) for atom in eqn.invars):
            self.equations.update((var, eqn) for var in eqn.outvars)

    def value(self, var: Any) -> np.ndarray:
        """Compile and run the equations of a constant."""
        eqns = list[compat.JaxprEqn]()
        needed = {var}
        for result, eqn in reversed([*self.equations.items()]):
            if result in needed and (not eqns or eqns[-1] is not eqn):
                eqns.append(eqn)
                needed.update(filter(compat.is_var, eqn.invars))
        inputs = [constant for constant in self.values if constant in needed]
        values = [np.asarray(self.values[constant]) for constant in inputs]

        def function(values: list[Any]) -> Any:
            bound = dict(zip(inputs, values, strict=True))
            return interpret_eqns(eqns[::-1], bound, [var])[0]

        # compiled ahead of time, so that a surrounding trace does not trace it
        with _on_cpu():
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
    is_constant = [atom in constants for atom in eqn.invars]
    if sum(is_constant) != 1 or batch[0] or len(contracted[0]) != 1:
        return None
    matrix_position = is_constant.index(True)
    x_position = 1 - matrix_position
    matrix = eqn.invars[matrix_position]
    if len(shape_of(matrix)) != 2 or not all(map(_is_real, (*eqn.invars, *eqn.outvars))):
        return None
    band = _band(matrix, constants, 1 - contracted[matrix_position][0])
    to = 0 if matrix_position == 0 else len(shape_of(eqn.outvars[0])) - 1
    return None if band is None else _Resized(band, x_position, contracted[x_position][0], to)


def _gather(eqn: compat.JaxprEqn, constants: _Constants) -> _Resized | None:
    """A gather of rows by constant indices, one for each row of the result."""
    numbers = eqn.params["dimension_numbers"]
    x, indices = map(shape_of, eqn.invars)
    collapsed = numbers.collapsed_slice_dims
    sizes = [1 if dim in collapsed else size for dim, size in enumerate(x)]
    row_by_row = len(indices) == 2 and len(collapsed) == 1 and numbers.start_index_map == collapsed
    if not row_by_row or numbers.operand_batching_dims or list(eqn.params["slice_sizes"]) != sizes:
        return None
    (dim,) = collapsed
    rows = _row_numbers(eqn.invars[1], constants, x[dim])
    if rows is None:
        return None
    ones = np.ones(len(rows), np.float32)
    band = Band.of((len(rows), x[dim]), np.arange(len(rows)), rows, ones)
    to = next(axis for axis in range(len(x)) if axis not in numbers.offset_dims)
    return None if band is None or not band.takes else _Resized(band, 0, dim, to)


def _scatter_add(eqn: compat.JaxprEqn, constants: _Constants) -> _Resized | None:
    """A scatter-add of rows by constant indices."""
    numbers = eqn.params["dimension_numbers"]
    x, indices, updates = map(shape_of, eqn.invars)
    inserted = numbers.inserted_window_dims
    indexes_inserted = numbers.scatter_dims_to_operand_dims == inserted
    row_by_row = len(indices) == 2 and len(inserted) == 1 and indexes_inserted
    if not row_by_row or numbers.operand_batching_dims or not _is_real(eqn.outvars[0]):
        return None
    (to,) = inserted
    dim = next(axis for axis in range(len(updates)) if axis not in numbers.update_window_dims)
    if [*updates[:dim], *updates[dim + 1 :]] != [*x[:to], *x[to + 1 :]]:
        return None
    rows = _row_numbers(eqn.invars[1], constants, x[to])
    if rows is None:
        return None
    ones = np.ones(len(rows), np.float32)
    band = Band.of((x[to], len(rows)), rows, np.arange(len(rows)), ones)
    return None if band is None else _Resized(band, 2, dim, to, addend=0)


_RULES: dict[str, Callable[[compat.JaxprEqn, _Constants], _Resized | None]] = {
    "dot_general": _product,
    "gather": _gather,
    "scatter-add": _scatter_add,
}


def _is_real(atom: Any) -> bool:
    return jnp.issubdtype(compat.aval_of(atom).dtype, jnp.floating)


def _band(matrix: Any, constants: _Constants, dim: int) -> Band | None:
    """The band of a constant matrix.

    Args:
      dim: the matrix's dimension that the result has.
    """
    shape = shape_of(matrix)
    elements = constants.elements_of(matrix) if math.prod(shape) <= _MOST_ELEMENTS else None
    if elements is None:
        return None
    *indices, values = elements
    return Band.of((shape[dim], shape[1 - dim]), indices[dim], indices[1 - dim], values)


def _row_numbers(indices: Any, constants: _Constants, size: int) -> np.ndarray | None:
    """Constant row numbers (n, 1) of an array; None if one is out of range.

    Args:
      size: rows of the array.
    """
    shape = shape_of(indices)
    if indices not in constants or shape[1:] != (1,) or shape[0] > _MOST_ROW_NUMBERS:
        return None
    numbers = constants.value(indices)[:, 0].astype(np.int64)
    return numbers if ((numbers >= 0) & (numbers < size)).all() else None


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Evaluate on the CPU if jax has it: a matrix may be larger than the free device memory."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
