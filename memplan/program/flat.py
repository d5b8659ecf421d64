"""A flat jaxpr and facts derived from it: variable numbers, readers, the graph with costs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from memplan.errors import UnsupportedProgramError
from memplan.planning.graph import Graph, Op, Value
from memplan.program import compat, ops
from memplan.program.interpret import interpret


def flatten(
    closed: compat.ClosedJaxpr,
    caller: compat.JaxprEqn | None = None,
) -> compat.ClosedJaxpr:
    """Inline every call and remove dead equations.

    A differentiated `jax.checkpoint` becomes a barrier over its inputs, and its equations, as in
    jax's lowering.

    Args:
      caller: the equation that runs the jaxpr; equations without a line of the user's own get its
        line.

    Raises:
      UnsupportedProgramError: a mutable array comes from outside; its writes could not be repeated.
    """
    for var, name in zip(closed.jaxpr.invars, compat.input_names(closed), strict=True):
        if compat.is_reference(var):
            raise _outside_reference(f"the argument {name}")
    if any(compat.is_reference(var) for var, _ in compat.consts_of(closed)):
        raise _outside_reference("a constant of the step")
    types = compat.structs_of(closed.jaxpr.invars)

    def inlined(*inputs: Any) -> list[Any]:
        return _inline(closed, inputs, inputs, caller)

    return compat.dce(compat.discharge_references(jax.make_jaxpr(inlined)(*types)))


def _inline(
    closed: compat.ClosedJaxpr,
    operands: Sequence[Any],
    inputs: Sequence[Any],
    caller: compat.JaxprEqn | None,
) -> list[Any]:
    """The results of a jaxpr whose calls are inlined.

    Args:
      inputs: of the outermost jaxpr.
      caller: the equation that calls the jaxpr.
    """

    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "name" and not any(operands[0] is value for value in inputs):
            return operands  # the equation that makes the value carries the pin's mark, too
        body = compat.call_body(eqn)
        if body is None:
            return compat.bind(eqn, operands)
        if compat.needs_barrier(eqn) and operands:
            operands = jax.lax.optimization_barrier(operands)
        rematted = jax.named_scope(compat.REMATTED)
        before, after = compat.constraints_of(eqn)
        operands = compat.constrained(operands, before)
        with rematted if compat.recomputes(eqn) else contextlib.nullcontext():
            results = _inline(body, operands, inputs, compat.nearest_source(eqn, caller))
        return compat.constrained(results, after)

    return interpret(closed, operands, rule, functools.partial(compat.user_context, caller=caller))


def _outside_reference(origin: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{origin} is a mutable array (jax.Ref): operations on it can be neither moved nor "
        "repeated. Pass its value and return the new one, or make the reference inside the step "
        "with jax.new_ref."
    )


@dataclass(frozen=True, eq=False)
class Flat:
    """A closed jaxpr without calls (`flatten`)."""

    closed: compat.ClosedJaxpr
    # the `shard_map`s in whose bodies it is, the outermost first
    shard_maps: tuple[compat.JaxprEqn, ...] = ()

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
        results = (var for eqn in self.eqns for var in eqn.outvars)
        return [*self.invars, *self.closed.jaxpr.constvars, *results]

    @functools.cached_property
    def number_of(self) -> Mapping[Any, int]:
        """The value id of each variable."""
        return {var: number for number, var in enumerate(self.values)}

    @functools.cached_property
    def readers(self) -> Mapping[Any, set[int]]:
        """The numbers of the equations that read each variable."""
        readers: dict[Any, set[int]] = {}
        for number, eqn in enumerate(self.eqns):
            for atom in filter(compat.is_var, eqn.invars):
                readers.setdefault(atom, set()).add(number)
        return readers

    @functools.cached_property
    def maker(self) -> Mapping[Any, compat.JaxprEqn]:
        """The equation that makes each variable, except inputs and constants."""
        return {var: eqn for eqn in self.eqns for var in eqn.outvars}

    @functools.cached_property
    def returned(self) -> frozenset[Any]:
        """Variables that the jaxpr returns."""
        return frozenset(filter(compat.is_var, self.outvars))

    @functools.cached_property
    def graph(self) -> Graph:
        """The equations with their costs and the values with their bytes.

        An op's id is its equation's number.
        """
        unread = {
            var
            for eqn in self.eqns
            for var in eqn.outvars
            if isinstance(var, compat.DropVar) and ops.of(eqn).fusion != "kernel"
        }

        def value(var: Any, name: str) -> Value:
            aval = var.aval
            nbytes = 0 if var in unread or compat.is_on_host(var) else compat.nbytes_of(aval)
            shape = tuple(getattr(aval, "shape", ()))
            return Value(name, nbytes, shape, str(getattr(aval, "dtype", aval)))

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
                shape=ops.matrix_shape(eqn),
                library_calls=ops.library_calls_of(eqn),
            )

        return Graph(tuple(map(value, self.values, self._names())), tuple(map(op, self.eqns)))

    def _names(self) -> list[str]:
        """A readable name of each value."""
        names = list(compat.input_names(self.closed))
        names += [f"constant:{number}" for number, _ in enumerate(self.closed.consts)]
        for eqn in self.eqns:
            names += [f"{eqn.primitive.name}:{number}" for number, _ in enumerate(eqn.outvars)]
        return names

    def inner(self, number: int, index: int) -> Flat:
        """One of the bodies of an equation (`compat.bodies_of`), flattened once.

        Args:
          number: the equation's number.
          index: the body's index.

        Raises:
          IndexError: the equation, or the body, does not exist.
          UnsupportedProgramError: see `flatten`.
        """
        if (number, index) not in self._inner:
            eqn = self.eqns[number]
            inner = replace(self, closed=compat.bodies_of(eqn)[index].body)
            if compat.is_shard_map(eqn):
                inner = replace(inner, shard_maps=(*self.shard_maps, eqn))
            with inner.inside():
                self._inner[number, index] = replace(inner, closed=flatten(inner.closed, eqn))
        return self._inner[number, index]

    @functools.cached_property
    def _inner(self) -> dict[tuple[int, int], Flat]:
        return {}

    def retraced(self, function: Callable[..., Any]) -> compat.ClosedJaxpr:
        """The jaxpr of another function with the same inputs."""
        with self.inside():
            return jax.make_jaxpr(function)(*compat.structs_of(self.invars))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block, jax traces as in the bodies of the `shard_map`s around the jaxpr."""
        with contextlib.ExitStack() as stack:
            for eqn in self.shard_maps:
                stack.enter_context(compat.inside(eqn))
            yield


@dataclass
class EquationWriter:
    """Writes a new jaxpr: equations of an old one, and traced functions of its variables."""

    flat: Flat  # the old jaxpr
    eqns: list[compat.JaxprEqn] = field(default_factory=list)
    # the new jaxpr's additional ones
    constants: dict[Any, np.ndarray] = field(default_factory=dict)

    def write(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Write the equations of a function of variables, literals and constants.

        Returns:
          The variable, or literal, of the function's result.
        """
        # jax caches a trace, with its variables, by the function's identity
        fresh = functools.partial(function)
        avals = (
            jax.ShapeDtypeStruct(operand.shape, operand.dtype)
            if isinstance(operand, np.ndarray)
            else compat.as_struct(operand.aval)
            for operand in operands
        )
        with self.flat.inside():
            part = jax.make_jaxpr(fresh)(*avals).jaxpr
        new_names = dict[Any, Any]()
        for var, operand in zip(part.invars, operands, strict=True):
            if isinstance(operand, np.ndarray):
                self.constants[var] = operand
            else:
                new_names[var] = operand
        self.eqns += (
            eqn.replace(
                invars=[renamed(new_names, atom) for atom in eqn.invars],
            )
            for eqn in part.eqns
        )
        return renamed(new_names, part.outvars[0])

    def define(self, var: Any, result: Any, first: int) -> None:
        """In the equations from `first` on, rename a result to a variable of the old jaxpr."""
        new_names = {result: var}
        self.eqns[first:] = (
            eqn.replace(
                invars=[renamed(new_names, atom) for atom in eqn.invars],
                outvars=[new_names.get(outvar, outvar) for outvar in eqn.outvars],
            )
            for eqn in self.eqns[first:]
        )

    def done(self) -> Flat:
        """The new jaxpr, without dead equations."""
        written = compat.with_eqns(self.flat.closed, self.eqns, self.constants)
        return replace(self.flat, closed=compat.dce(written))


def renamed(new_names: Mapping[Any, Any], atom: Any) -> Any:
    """The new name of a variable; the variable or literal itself if it has none."""
    return new_names.get(atom, atom) if compat.is_var(atom) else atom
