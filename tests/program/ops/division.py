"""Which axes divide an equation into equal, independent parts."""

from memplan.planning.graph import Rows
from memplan.program import compat
from memplan.program.ops import Axes, shape_of


def divisible(axes: Axes, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
    """Every dimension of the axis is a multiple of this number, and parts read only their own rows."""
    # parts are not independent
    if axis in axes.carried or axes.reduced.get(axis) == "moments":
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    sides = zip(atoms, (*axes.operands, *axes.results), strict=True)
    sizes = [shape_of(atom)[side.index(axis)] for atom, side in sides if axis in side]
    rows = [
        (axes.rows_of(position, axis), shape_of(eqn.invars[position])[axes.operands[position].index(axis)])
        for position, rows_axis in axes.rows
        if rows_axis == axis
    ]
    count = axes.counted(axis, eqn)
    return all(size % parts == 0 for size in sizes) and all(
        reads_own_part(rows_of_operand, count, size, parts) for rows_of_operand, size in rows
    )


def reads_own_part(rows: Rows, result_rows: int, operand_rows: int, parts: int) -> bool:
    """Does each of `parts` equal parts of the result read only the same part of the operand?"""
    result_part, operand_part = result_rows // parts, operand_rows // parts
    for part in range(parts):
        low, high = rows.of(part * result_part, (part + 1) * result_part)
        if low < part * operand_part or high > (part + 1) * operand_part:
            return False
    return result_rows * rows.scale == operand_rows
