"""Convolutions in loops with their channels last, for XLA:CPU.

It brings those of the entry computation into this form by itself, and hands them to a library. In the body of a loop it
leaves them as they are, and what has another form, such as every gradient of a convolution, is computed element by
element: a small U-Net in slabs took three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from memplan.program import compat
from memplan.program.interpret import interpret


def channels_last(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """The jaxpr with the convolutions in its scans so; arrays that they read or make are transposed there."""
    return _traced(closed, in_loop=False)


def _traced(closed: compat.ClosedJaxpr, in_loop: bool) -> compat.ClosedJaxpr:
    avals = [compat.as_struct(var.aval) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *operands: interpret(closed, operands, partial(_run, in_loop)))(*avals)


def _run(in_loop: bool, eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    if eqn.primitive.name == "scan":
        body = _traced(eqn.params["jaxpr"], in_loop=True)
        return compat.bind(eqn.replace(params={**eqn.params, "jaxpr": body}), operands)
    if in_loop and eqn.primitive.name == "conv_general_dilated" and eqn.params["batch_group_count"] == 1:
        return [_convolution(eqn, *operands)]
    return compat.bind(eqn, operands)


def _convolution(eqn: compat.JaxprEqn, x: Any, kernel: Any) -> Any:
    numbers, rank = eqn.params["dimension_numbers"], x.ndim
    space = range(1, rank - 1)
    last = lax.ConvDimensionNumbers(
        (0, rank - 1, *space), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *space)
    )
    batch, channels, *others = numbers.lhs_spec
    out, into, *window = numbers.rhs_spec
    operands = lax.transpose(x, (batch, *others, channels)), lax.transpose(kernel, (*window, into, out))
    (made,) = compat.bind(eqn.replace(params={**eqn.params, "dimension_numbers": last}), operands)
    batch, channels, *others = numbers.out_spec
    order = (batch, *others, channels)
    return lax.transpose(made, tuple(map(order.index, range(rank))))
