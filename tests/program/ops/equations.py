"""The equations of a function, each with what it reads and makes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.interpret import interpret
from memplan.program.ops import Axes, axes_of
from tests.program.scans import QUICK


class Equation(NamedTuple):
    eqn: compat.JaxprEqn
    axes: Axes
    operands: list[Any]
    results: list[Any]


def equations_with_axes(
    function: Callable[..., Any],
    args: Sequence[Any],
    is_wanted: Callable[[compat.JaxprEqn, Axes], bool],
) -> list[Equation]:
    """Those that are wanted; one compiled program computes all their operands and results."""
    closed = flatten(jax.make_jaxpr(function)(*args))
    axes_of_each = ((eqn, axes_of(eqn)) for eqn in closed.jaxpr.eqns)
    pairs = [(eqn, axes) for eqn, axes in axes_of_each if axes is not None and is_wanted(eqn, axes)]
    if not pairs:
        return []
    wanted = {id(eqn) for eqn, _ in pairs}

    def numbers(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        numbers_of_each = list[tuple[list[Any], list[Any]]]()

        def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
            results = list(compat.bind(eqn, operands))
            if id(eqn) in wanted:
                numbers_of_each.append((operands, results))
            return results

        interpret(closed, list(args), rule)
        return numbers_of_each

    numbers_of_each = jax.jit(numbers, compiler_options=QUICK)(*args)
    return [Equation(*pair, *both) for pair, both in zip(pairs, numbers_of_each, strict=True)]
