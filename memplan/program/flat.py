"""A flat jaxpr and its derived facts: variables by number, their readers, its graph with costs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from memplan.errors import UnsupportedProgramError
from memplan.planning.graph import Graph, Op, Value
from memplan.program import compat, ops
from memplan.program.interpret import interpret


def flatten(closed: compat.ClosedJaxpr, caller: compat.JaxprEqn | None = None) -> compat.ClosedJaxpr:
    """Inline every call and remove dead equations.

    A differentiated `jax.checkpoint` becomes a barrier over its inputs and its equations, as in jax's lowering.

    Args:
      caller: the equation that runs it, whose line is that of equations without one of the user's own.

    Raises:
      UnsupportedProgramError: a mutable array comes from outside; its writes could not be repeated.
    """
    for var, name in zip(closed.jaxpr.invars, compat.input_names(closed), strict=True):
        if compat.is_reference(var):
            raise _outside_reference(f"the argument {name}")
    if any(compat.is_reference(var) for var, _ in compat.consts_of(closed)):
        raise _outside_reference("a constant of the step")
    types = [compat.as_struct(var.aval) for var in closed.jaxpr.invars]

    def inlined(*inputs: Any) -> list[Any]:
        return _inline(closed, inputs, inputs, caller)

    return compat.dce(compat.discharge_references(jax.make_jaxpr(inlined)(*types)))


def _inline(
    closed: compat.ClosedJaxpr, operands: Sequence[Any], inputs: Sequence[Any], caller: compat.JaxprEqn | None
) -> list[Any]:
    """The results of a jaxpr within one that has these inputs, called by an equation."""

    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "name" and not any(operands[0] is one for one in inputs):
            return operands  # its pin, if any, is also that of what makes the value
        body = compat.call_body(eqn)
        if body is None:
            return compat.bind(eqn, operands)
        if compat.needs_barrier(eqn) and operands:
            operands = jax.lax.optimization_barrier(operands)
        with jax.named_scope(compat.REMATTED) if compat.recomputes(eqn) else contextlib.nullcontext():
            return _inline(body, operands, inputs, compat.nearest_source(eqn, caller))

    return interpret(closed, operands, rule, functools.partial(compat.user_context, caller=caller))


def _outside_reference(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{what} is a mutable array (jax.Ref): operations on it can be neither moved nor repeated. Pass its value and "
        "return the new one, or make the reference inside the step with jax.new_ref."
    )


@dataclass(frozen=True, eq=False)
class Flat:
    """A closed jaxpr without calls (`flatten`)."""

    closed: compat.ClosedJaxpr

    @property
    def eqns(self) -> Sequence[compat.JaxprEqn]:
        return self.closed.jaxpr.eqns

    @property
    def invars(self) -> Sequence[Any]:
        return self.closed.jaxpr.invars

    @property
    def outvars(self) -> Sequence[Any]:
        """Variables and literals."""
        return self.closed.jaxpr.outvars

    @functools.cached_property
    def values(self) -> list[Any]:
        """Variables by value id: inputs, constants, results of equations."""
        made = (var for eqn in self.eqns for var in eqn.outvars)
        return [*self.invars, *self.closed.jaxpr.constvars, *made]

    @functools.cached_property
    def number_of(self) -> Mapping[Any, int]:
        """By variable, its value id."""
        return {var: number for number, var in enumerate(self.values)}

    @functools.cached_property
    def readers(self) -> Mapping[Any, set[int]]:
        """By variable, the numbers of the equations that read it."""
        found: dict[Any, set[int]] = {}
        for number, eqn in enumerate(self.eqns):
            for atom in filter(compat.is_var, eqn.invars):
                found.setdefault(atom, set()).add(number)
        return found

    @functools.cached_property
    def returned(self) -> frozenset[Any]:
        """Variables that the jaxpr returns."""
        return frozenset(filter(compat.is_var, self.outvars))

    @functools.cached_property
    def graph(self) -> Graph:
        """Its equations with their costs, its values with their bytes; an op's id is its equation's number."""
        names = [*compat.input_names(self.closed), *(f"constant:{n}" for n, _ in enumerate(self.closed.consts))]
        names += [f"{eqn.primitive.name}:{number}" for eqn in self.eqns for number, _ in enumerate(eqn.outvars)]
        unread = {
            var
            for eqn in self.eqns
            for var in eqn.outvars
            if isinstance(var, compat.DropVar) and ops.of(eqn).fusion != "kernel"
        }

        def value(var: Any, name: str) -> Value:
            aval = var.aval
            nbytes = 0 if var in unread or compat.is_on_host(var) else compat.nbytes_of(aval)
            return Value(name, nbytes, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval)))

        def op(eqn: compat.JaxprEqn) -> Op:
            return Op(
                name=eqn.primitive.name,
                inputs=tuple(self.number_of[atom] for atom in eqn.invars if compat.is_var(atom)),
                outputs=tuple(self.number_of[var] for var in eqn.outvars),
                flops=ops.flops_of(eqn),
                flops_dtype=ops.matrix_dtype(eqn),
                fusion=ops.of(eqn).fusion,
                along_rows=ops.is_along_rows(eqn),
                traffic_nbytes=ops.traffic_of(eqn),
                recomputable=ops.is_recomputable(eqn),
                source=compat.relative(compat.source_of(eqn)),
            )

        return Graph(tuple(map(value, self.values, names)), tuple(map(op, self.eqns)))

    def inner(self, number: int, index: int) -> Flat:
        """One of the computations of an equation (`compat.computations_of`); the same each time.

        Raises:
          IndexError: there is none.
          UnsupportedProgramError: see `flatten`.
        """
        if (number, index) not in self._inner:
            eqn = self.eqns[number]
            self._inner[number, index] = Flat(flatten(compat.computations_of(eqn)[index].body, eqn))
        return self._inner[number, index]

    @functools.cached_property
    def _inner(self) -> dict[tuple[int, int], Flat]:
        return {}

    def retraced(self, function: Callable[..., Any]) -> compat.ClosedJaxpr:
        """The jaxpr of another function with the same inputs."""
        return jax.make_jaxpr(function)(*(compat.as_struct(var.aval) for var in self.invars))


@dataclass
class Writer:
    """Equations of a new jaxpr that shares variables with an old one: some of its equations, and traced functions."""

    flat: Flat  # the old one
    eqns: list[compat.JaxprEqn] = field(default_factory=list)
    constants: dict[Any, np.ndarray] = field(default_factory=dict)  # constants that the old one does not have

    def write(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Write the equations of a function of variables, literals and constants; returns its result."""
        fresh = functools.partial(function)  # jax caches traces by function, with their variables
        avals = (
            jax.ShapeDtypeStruct(one.shape, one.dtype) if isinstance(one, np.ndarray) else compat.as_struct(one.aval)
            for one in operands
        )
        part = jax.make_jaxpr(fresh)(*avals).jaxpr
        known = dict[Any, Any]()
        for var, one in zip(part.invars, operands, strict=True):
            if isinstance(one, np.ndarray):
                self.constants[var] = one
            else:
                known[var] = one
        self.eqns += (eqn.replace(invars=[renamed(known, atom) for atom in eqn.invars]) for eqn in part.eqns)
        return renamed(known, part.outvars[0])

    def define(self, var: Any, made: Any, first: int) -> None:
        """Rename a result of the equations from `first` on to a variable of the old jaxpr."""
        known = {made: var}
        self.eqns[first:] = (
            eqn.replace(
                invars=[renamed(known, atom) for atom in eqn.invars],
                outvars=[known.get(one, one) for one in eqn.outvars],
            )
            for eqn in self.eqns[first:]
        )

    def done(self) -> Flat:
        """The new jaxpr, without dead equations."""
        return Flat(compat.dce(compat.with_eqns(self.flat.closed, self.eqns, self.constants)))


def renamed(known: Mapping[Any, Any], atom: Any) -> Any:
    """The new name of a variable, if it has one."""
    return known.get(atom, atom) if compat.is_var(atom) else atom
