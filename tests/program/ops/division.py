"""Which axes divide an equation into equal parts that need nothing of one another."""

from __future__ import annotations

from memplan.planning.graph import Rows
from memplan.program import compat
from memplan.program.ops import Axes, shape_of


def divisible(axes: Axes, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
    """Every dimension of the axis is a multiple of this number, and parts read only their own rows."""
    if axis in axes.carried or axes.reduced.get(axis) == "moments":  # parts want more of others than their results
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    sides = zip(atoms, (*axes.operands, *axes.results), strict=True)
    sizes = [shape_of(atom)[dim] for atom, side in sides for dim, found in enumerate(side) if found == axis]
    rows = [
        (axes.rows_of(position, axis), shape_of(eqn.invars[position])[axes.operands[position].index(axis)])
        for position, along in axes.rows
        if along == axis
    ]
    made = axes.counted(axis, eqn)
    return all(size % parts == 0 for size in sizes) and all(apart(one, made, size, parts) for one, size in rows)


def apart(rows: Rows, made: int, given: int, parts: int) -> bool:
    """Does each of `parts` equal parts of the result read only the same part of the operand?"""
    own, mine = made // parts, given // parts
    spans = [rows.of(part * own, (part + 1) * own) for part in range(parts)]
    inside = all(low >= part * mine and high <= (part + 1) * mine for part, (low, high) in enumerate(spans))
    return made * rows.scale == given and inside
