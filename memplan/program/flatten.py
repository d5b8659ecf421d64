"""A jaxpr without calls and dead equations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from memplan.errors import UnsupportedProgramError
from memplan.program import compat
from memplan.program.interpret import interpret


def flatten(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Inline every call and drop what nothing depends on.

    A differentiated `jax.checkpoint` becomes a barrier over its inputs and its equations: what jax lowers it to.

    Raises:
      UnsupportedProgramError: a mutable array comes in from outside; what is done to it could not be done again.
    """
    for var, name in zip(closed.jaxpr.invars, compat.input_names(closed), strict=True):
        if compat.is_reference(var):
            raise _outside_reference(f"the argument {name}")
    if any(compat.is_reference(var) for var, _ in compat.consts_of(closed)):
        raise _outside_reference("a constant of the step")
    types = [var.aval if compat.is_on_host(var) else compat.as_struct(var.aval) for var in closed.jaxpr.invars]
    flat = jax.make_jaxpr(functools.partial(_inline, closed))(*types)
    return compat.dce(compat.discharge_references(flat))


def _inline(closed: compat.ClosedJaxpr, *operands: Any, caller: compat.JaxprEqn | None = None) -> list[Any]:
    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        body = compat.call_body(eqn)
        if body is None:
            return compat.bind(eqn, operands)
        if compat.needs_barrier(eqn) and operands:
            operands = jax.lax.optimization_barrier(operands)
        return _inline(body, *operands, caller=eqn if compat.source_of(eqn) else caller)

    return interpret(closed, operands, rule, functools.partial(compat.user_context, caller=caller))


def _outside_reference(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{what} is a mutable array (jax.Ref): operations on it can be neither moved nor repeated. Pass its value and "
        "return the new one, or make the reference inside the step with jax.new_ref."
    )
