"""Which axes divide an equation into equal, independent parts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memplan.planning.graph import Rows
from memplan.program import compat
from memplan.program.ops import Axes, local_params, shape_of
from tests.program.ops.equations import equations_with_axes


def divisible(axes: Axes, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
    """Every dimension of the axis is a multiple of this number, and parts read only their own rows."""
    # parts are not independent
    if axis in axes.carried or axes.reduced.get(axis) == "moments":
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    sides = zip(atoms, (*axes.operands, *axes.results), strict=True)
    sizes = [shape_of(atom)[side.index(axis)] for atom, side in sides if axis in side]
    rows = [
        (
            axes.rows_of(position, axis),
            shape_of(eqn.invars[position])[axes.operands[position].index(axis)],
        )
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


def divided(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, operands: list[Any], parts: int
) -> list[Any]:
    """Results of an equation from its parts."""
    params = local_params(eqn, axes, axis, lambda size: size // parts)
    results_by_part = []
    for part in range(parts):
        part_operands = [
            np.split(np.asarray(x), parts, side.index(axis))[part] if axis in side else x
            for x, side in zip(operands, axes.operands, strict=True)
        ]
        if axis in axes.reduced and part:
            for position in axes.masked:
                part_operands[position] = np.zeros_like(part_operands[position])
        results_by_part.append(compat.bind(eqn.replace(params=params), part_operands))
    combined = []
    for results, side in zip(zip(*results_by_part, strict=True), axes.results, strict=True):
        if axis in side:
            combined.append(np.concatenate(results, side.index(axis)))
        elif axis in axes.reduced:
            combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[axes.reduced[axis]]
            combined.append(combine.reduce(results))
        else:
            for part_result in results[1:]:
                np.testing.assert_array_equal(results[0], part_result)
            combined.append(results[0])
    return combined


def check_parts(
    function: Callable[..., Any], args: Sequence[Any], parts: int, tolerance: float
) -> int:
    """Each equation on parts, along its divisible axes, is that on the whole; how many axes."""

    def is_wanted(eqn: compat.JaxprEqn, axes: Axes) -> bool:
        return eqn.primitive.name != "iota"  # counts from where its part begins

    count = 0
    for eqn, axes, operands, whole in equations_with_axes(function, args, is_wanted):
        sides = (*axes.operands, *axes.results)
        for axis in {name for side in sides for name in side if name is not None}:
            if divisible(axes, axis, eqn, parts):
                pairs = zip(divided(eqn, axes, axis, operands, parts), whole, strict=True)
                for result, wanted in pairs:
                    np.testing.assert_allclose(
                        result, wanted, tolerance, tolerance, err_msg=str(eqn)
                    )
                count += 1
    return count
