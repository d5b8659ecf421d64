"""The interpreter of jaxprs: evaluates equations as they are, or by a rule."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memplan.program import compat


class Equation(Protocol):
    """A jax equation, or several in one: it reads variables or literals and defines variables."""

    @property
    def invars(self) -> Sequence[Any]: ...

    @property
    def outvars(self) -> Sequence[Any]: ...


def interpret(
    closed: compat.ClosedJaxpr,
    operands: Sequence[Any],
    rule: Callable[[compat.JaxprEqn, list[Any]], Sequence[Any]] = compat.bind,
    context: Callable[[compat.JaxprEqn], AbstractContextManager[Any]] = compat.user_context,
) -> list[Any]:
    """The results of a jaxpr, from its inputs; see `interpret_eqns`."""
    return interpret_eqns(
        closed.jaxpr.eqns,
        bindings(closed, operands),
        closed.jaxpr.outvars,
        rule,
        context,
    )


def bindings(closed: compat.ClosedJaxpr, operands: Sequence[Any]) -> dict[compat.Var, Any]:
    """A jaxpr's constants and inputs with their values."""
    return {
        **dict(compat.consts_of(closed)),
        **dict(zip(closed.jaxpr.invars, operands, strict=True)),
    }


def interpret_eqns[E: Equation](
    eqns: Sequence[E],
    bound: Mapping[Any, Any],
    outputs: Sequence[Any],
    rule: Callable[[E, list[Any]], Sequence[Any]] = compat.bind,
    context: Callable[[E], AbstractContextManager[Any]] = compat.user_context,
) -> list[Any]:
    """Evaluate equations in order, and return the values of `outputs` (variables and literals).

    Args:
      bound: values of variables; a variable that has one is not assigned again.
      rule: the results of an equation, from its operands.
      context: surrounds the rule; by default the equation's own source, name stack and mesh.
    """
    env = dict(bound)
    dead = _dead_after(eqns, outputs)
    for number, eqn in enumerate(eqns):
        operands = [compat.read(env, atom) for atom in eqn.invars]
        with context(eqn):
            results = rule(eqn, operands)
        for var, result in zip(eqn.outvars, results, strict=True):
            if var not in bound:
                env[var] = result
        for var in dead[number]:
            env.pop(var, None)
    return [compat.read(env, atom) for atom in outputs]


def _dead_after(eqns: Sequence[Equation], outputs: Sequence[Any]) -> Mapping[int, list[Any]]:
    """For each equation, the variables that no later equation reads."""
    last: dict[Any, int] = {}
    for number, eqn in enumerate(eqns):
        last.update((atom, number) for atom in (*eqn.outvars, *eqn.invars) if compat.is_var(atom))
    dead = defaultdict[int, list[Any]](list)
    for var in last.keys() - set(filter(compat.is_var, outputs)):
        dead[last[var]].append(var)
    return dead
