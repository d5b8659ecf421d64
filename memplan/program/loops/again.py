"""Equations of a forward body that a backward body runs again, in the order of its reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan.program import compat
from memplan.program.interpret import interpret_eqns


@dataclass(frozen=True, eq=False)
class Again:
    """A group of equations as one, which may wait for values of the backward body.

    XLA may otherwise run all groups first, and all their results are alive at once: of eight
    convolutional layers in a `switch`, each from its own input, 7.6 MiB on a CPU and not 4.9.
    Equations behind the group read these values as they are after the wait. XLA may otherwise
    compute them again from all layers so far, whose gradients are then alive at once: of ten layers
    with residual sums, 6.1 MiB and not 4.1.
    """

    eqns: Sequence[compat.JaxprEqn]
    invars: tuple[Any, ...]  # what it reads, then what it waits for
    outvars: tuple[Any, ...]  # its results, then what it waited for
    awaited: tuple[Any, ...] = ()

    @classmethod
    def of(cls, eqns: Sequence[compat.JaxprEqn], wanted: Sequence[Any]) -> Again:
        """The equations, whose results are those that are wanted."""
        made = {var for eqn in eqns for var in eqn.outvars}
        reads = [atom for eqn in eqns for atom in eqn.invars if compat.is_var(atom)]
        invars = tuple(dict.fromkeys(var for var in reads if var not in made))
        return cls(eqns, invars, tuple(var for var in wanted if var in made))

    def after(self, variables: Sequence[Any]) -> Again:
        """The same, which waits for these variables."""
        invars, outvars = (*self.invars, *variables), (*self.outvars, *variables)
        return replace(self, invars=invars, outvars=outvars, awaited=tuple(variables))

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Its results, and what it waited for."""
        if self.awaited:
            operands = jax.lax.optimization_barrier(list(operands))
        with jax.named_scope(compat.REMATTED):
            bound = dict(zip(self.invars, operands, strict=True))
            return interpret_eqns(self.eqns, bound, self.outvars)


def with_groups(
    eqns: Sequence[compat.JaxprEqn], groups: Sequence[Again], results: Sequence[Any], waits: bool
) -> list[compat.JaxprEqn | Again]:
    """The equations of a backward body, each behind the groups that it is the first to read.

    Args:
      results: of the body.
      waits: a group waits for what its first reader reads, if there are several groups. If that
        reads nothing else, the group waits for the latest variable that follows from another group.
    """
    group_of = {var: group for group in groups for var in group.outvars}
    ordered = list[compat.JaxprEqn | Again]()
    before = set[Any]()  # variables that equations before have made
    following = dict[Any, None]()  # those of them that follow from a group
    placed = set[int]()  # ids of groups
    for eqn in eqns:
        reads = list(dict.fromkeys(atom for atom in eqn.invars if compat.is_var(atom)))
        for group in dict.fromkeys(group_of[var] for var in reads if var in group_of):
            if id(group) not in placed:
                placed.add(id(group))
                awaited = [var for var in reads if var in before] or [*following][-1:]
                ordered.append(group.after(awaited if waits and len(groups) > 1 else ()))
        ordered.append(eqn)
        before.update(eqn.outvars)
        if any(var in group_of or var in following for var in reads):
            following.update(dict.fromkeys(eqn.outvars))
    returned = (group_of[atom] for atom in results if compat.is_var(atom) and atom in group_of)
    ordered += (group for group in dict.fromkeys(returned) if id(group) not in placed)
    return ordered


def context_of(eqn: compat.JaxprEqn | Again) -> AbstractContextManager[Any]:
    """What surrounds an equation while it is evaluated."""
    return nullcontext() if isinstance(eqn, Again) else compat.user_context(eqn)
