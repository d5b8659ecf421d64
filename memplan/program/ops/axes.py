"""Which dimensions of an equation's operands and results are one: its axes, along which its work can be divided.

Dimensions on the same axis are divided together; an axis that only operands have is summed over (or reduced otherwise).
A dimension on no axis cannot be divided. Along an axis, rows of a result may read other rows of an operand than their
own: `Rows` says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan.planning.graph import ALIGNED, Rows
from memplan.program import compat

Axis = int | None
Reduction = Literal["sum", "max", "min", "moments"]
"""How parts are put together; of moments each part has more than its result (`moments.Moments`)."""


@dataclass(frozen=True)
class Axes:
    """The axes of one equation."""

    # operands, results: for each, the axis of every dimension
    operands: tuple[tuple[Axis, ...], ...]
    results: tuple[tuple[Axis, ...], ...]
    # axis -> how it disappears, for those that no result has
    reduced: Mapping[int, Reduction] = field(default_factory=dict)
    # positions of operands to which the sum over an axis is added: they count once, not in every part
    masked: tuple[int, ...] = ()
    # (position of an operand, axis) -> the rows that a result's rows read, where they are not the same ones; of a
    # reduced axis, the rows that go with those of the last operand
    rows: Mapping[tuple[int, int], Rows] = field(default_factory=dict)
    # axes along which a row of the result is one of an operand and the row of the result before it
    carried: tuple[int, ...] = ()

    def dim_of(self, side: Sequence[Axis], axis: int) -> int | None:
        return side.index(axis) if axis in side else None

    def rows_of(self, position: int, axis: int) -> Rows:
        """The rows of an operand on the axis that a result's rows read."""
        return self.rows.get((position, axis), ALIGNED)

    def last_on(self, axis: int) -> int:
        """The position of the last operand on the axis, by whose rows an equation counts that reduces it."""
        return max(position for position, side in enumerate(self.operands) if axis in side)

    def counted(self, axis: int, eqn: compat.JaxprEqn) -> int:
        """How many rows the axis has: of the result, or where it is reduced of the last operand on it."""
        if axis in self.reduced:
            sides = zip(reversed(self.operands), reversed(eqn.invars), strict=True)
        else:
            sides = zip(self.results, eqn.outvars, strict=True)
        return next(shape_of(atom)[side.index(axis)] for side, atom in sides if axis in side)

    def leave(self, position: int, axis: int, eqn: compat.JaxprEqn) -> bool:
        """Rows of the result that exist read some of an operand that do not."""
        given = shape_of(eqn.invars[position])[self.operands[position].index(axis)]
        return self.rows_of(position, axis).reads_padding(self.counted(axis, eqn), given)


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(compat.aval_of(atom).shape)


def parallel(eqn: compat.JaxprEqn, blocked: Sequence[int] = ()) -> Axes:
    """Results have the dimensions of the operands, scalars none. Those repeated or `blocked` cannot be divided."""
    result = shape_of(eqn.outvars[0])
    rank = len(result)
    if any(len(shape_of(atom)) not in (0, rank) for atom in eqn.invars):
        blocked = range(rank)
    names = tuple(None if dim in blocked or dim - rank in blocked else dim for dim in range(rank))

    def side(atom: Any) -> tuple[Axis, ...]:
        return tuple(None if size != result[dim] else names[dim] for dim, size in enumerate(shape_of(atom)))

    return Axes(tuple(map(side, eqn.invars)), tuple(names for _ in eqn.outvars))


def without(eqn: compat.JaxprEqn, gone: Sequence[int]) -> Axes:
    """The result has the dimensions of its operand but for these, which cannot be divided."""
    rank = len(shape_of(eqn.invars[0]))
    operand = tuple(None if dim in gone or dim - rank in gone else dim for dim in range(rank))
    return Axes((operand,), (tuple(dim for dim in operand if dim is not None),))


def with_rows(eqn: compat.JaxprEqn, rows: Mapping[tuple[int, int], Rows] | Sequence[Rows]) -> Axes:
    """One axis per dimension; the rows by operand and axis, or by axis the same of all operands (but scalars)."""
    names = tuple(range(len(shape_of(eqn.outvars[0]))))
    operands = tuple(names if len(shape_of(atom)) == len(names) else () for atom in eqn.invars)
    if not isinstance(rows, Mapping):
        rows = {(position, dim): one for dim, one in enumerate(rows) for position, side in enumerate(operands) if side}
    return Axes(operands, tuple(names for _ in eqn.outvars), rows=rows)
