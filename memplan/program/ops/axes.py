"""The axes of an equation, along which its work can be divided.

An axis relates dimensions of operands and results, which are divided together. An axis that only
operands have is summed over, or reduced otherwise. A dimension on no axis cannot be divided. Along
an axis, a row of a result may read other rows of an operand than its own: `Rows` says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan.planning.graph import ALIGNED, Rows
from memplan.program import compat

Axis = int | None  # None: the dimension is on no axis
Reduction = Literal["sum", "max", "min", "moments"]
"""How parts are combined. A part of "moments" has more than the result (`moments.Moments`)."""


@dataclass(frozen=True)
class Axes:
    """The axes of one equation."""

    operands: tuple[tuple[Axis, ...], ...]  # for each operand, the axis of every dimension
    results: tuple[tuple[Axis, ...], ...]  # for each result, the axis of every dimension
    # axis that no result has -> how its parts are combined
    reduced: Mapping[int, Reduction] = field(default_factory=dict)
    # positions of operands that a sum over an axis adds to: they count once, not in every part
    masked: tuple[int, ...] = ()
    # (position of an operand, axis) -> the rows that a result's rows read, if they are others than
    # its own; of a reduced axis, the rows that belong to rows of the last operand
    rows: Mapping[tuple[int, int], Rows] = field(default_factory=dict)
    # axes along which a row of the result depends on an operand's row and on the result's row
    # before it
    carried: tuple[int, ...] = ()

    def dim_of(self, side: Sequence[Axis], axis: int) -> int | None:
        """The dimension of an operand or result on the axis; None if it has none."""
        return side.index(axis) if axis in side else None

    def rows_of(self, position: int, axis: int) -> Rows:
        """The rows of an operand on the axis that a result's rows read."""
        return self.rows.get((position, axis), ALIGNED)

    def last_on(self, axis: int) -> int:
        """The position of the last operand on the axis; a reduction counts that operand's rows."""
        return max(position for position, side in enumerate(self.operands) if axis in side)

    def counted(self, axis: int, eqn: compat.JaxprEqn) -> int:
        """Rows on the axis: the result's or, if it is reduced, those of the last operand on it."""
        if axis in self.reduced:
            sides = zip(reversed(self.operands), reversed(eqn.invars), strict=True)
        else:
            sides = zip(self.results, eqn.outvars, strict=True)
        return next(shape_of(atom)[side.index(axis)] for side, atom in sides if axis in side)

    def leave(self, position: int, axis: int, eqn: compat.JaxprEqn) -> bool:
        """Do rows of the result read rows that an operand does not have?"""
        rows = shape_of(eqn.invars[position])[self.operands[position].index(axis)]
        return self.rows_of(position, axis).reads_padding(self.counted(axis, eqn), rows)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(compat.aval_of(atom).shape)


def parallel(eqn: compat.JaxprEqn, blocked: Sequence[int] = ()) -> Axes:
    """One axis for each dimension of the results, which all operands but scalars share.

    Dimensions along which an operand is repeated, and `blocked` ones, cannot be divided.
    """
    result = shape_of(eqn.outvars[0])
    rank = len(result)
    if any(len(shape_of(atom)) not in (0, rank) for atom in eqn.invars):
        blocked = range(rank)
    names = tuple(None if dim in blocked or dim - rank in blocked else dim for dim in range(rank))

    def side(atom: Any) -> tuple[Axis, ...]:
        sizes = enumerate(shape_of(atom))
        return tuple(names[dim] if size == result[dim] else None for dim, size in sizes)

    return Axes(tuple(map(side, eqn.invars)), tuple(names for _ in eqn.outvars))


def without(eqn: compat.JaxprEqn, dims: Sequence[int]) -> Axes:
    """The result has the operand's dimensions without some, which cannot be divided."""
    rank = len(shape_of(eqn.invars[0]))
    operand = tuple(None if dim in dims or dim - rank in dims else dim for dim in range(rank))
    return Axes((operand,), (tuple(dim for dim in operand if dim is not None),))


def with_rows(eqn: compat.JaxprEqn, rows: Mapping[tuple[int, int], Rows] | Sequence[Rows]) -> Axes:
    """One axis for each dimension, with the rows that results read.

    Args:
      rows: by operand and axis; or by axis, the same for all operands but scalars.
    """
    names = tuple(range(len(shape_of(eqn.outvars[0]))))
    operands = tuple(names if len(shape_of(atom)) == len(names) else () for atom in eqn.invars)
    if not isinstance(rows, Mapping):
        arrays = [position for position, side in enumerate(operands) if side]
        by_dim = enumerate(rows)
        rows = {(position, dim): dim_rows for dim, dim_rows in by_dim for position in arrays}
    return Axes(operands, tuple(names for _ in eqn.outvars), rows=rows)
