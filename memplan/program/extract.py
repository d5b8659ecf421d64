"""The body of a loop -> its graph: equations become operations with their costs, variables values with their bytes."""

from __future__ import annotations

from typing import Any

from memplan.planning.graph import Graph, Op, Value
from memplan.program import compat, ops


def variables(closed: compat.ClosedJaxpr) -> list[Any]:
    """The variables of a flat jaxpr by value id: inputs, constants, results of equations."""
    made = (var for eqn in closed.jaxpr.eqns for var in eqn.outvars)
    return [*closed.jaxpr.invars, *(var for var, _ in compat.consts_of(closed)), *made]


def readers(closed: compat.ClosedJaxpr) -> dict[Any, set[int]]:
    """By variable, the equations that read it."""
    found: dict[Any, set[int]] = {}
    for number, eqn in enumerate(closed.jaxpr.eqns):
        for atom in filter(compat.is_var, eqn.invars):
            found.setdefault(atom, set()).add(number)
    return found


def body_graph(flat: compat.ClosedJaxpr) -> Graph:
    """The graph of a flat jaxpr; op ids are equation indices, value ids those of `variables`."""
    names = [*compat.input_names(flat), *(f"constant:{number}" for number, _ in enumerate(compat.consts_of(flat)))]
    names += [f"{eqn.primitive.name}:{number}" for eqn in flat.jaxpr.eqns for number, _ in enumerate(eqn.outvars)]
    known = variables(flat)
    ids = {var: number for number, var in enumerate(known)}
    unread = {
        var
        for eqn in flat.jaxpr.eqns
        for var in eqn.outvars
        if isinstance(var, compat.DropVar) and ops.of(eqn).fusion != "kernel"
    }
    values = tuple(_value(var, name, var in unread) for var, name in zip(known, names, strict=True))
    return Graph(values, tuple(_op(eqn, ids) for eqn in flat.jaxpr.eqns))


def _value(var: Any, name: str, unread: bool) -> Value:
    aval = var.aval
    nbytes = 0 if unread or compat.is_on_host(var) else compat.nbytes_of(aval)
    return Value(name, nbytes, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval)))


def _op(eqn: compat.JaxprEqn, ids: dict[Any, int]) -> Op:
    return Op(
        name=eqn.primitive.name,
        inputs=tuple(ids[atom] for atom in eqn.invars if compat.is_var(atom)),
        outputs=tuple(ids[var] for var in eqn.outvars),
        flops=ops.flops_of(eqn),
        flops_dtype=ops.matrix_dtype(eqn),
        fusion=ops.of(eqn).fusion,
        along_rows=ops.is_along_rows(eqn),
        traffic_nbytes=ops.traffic_of(eqn),
        recomputable=ops.is_recomputable(eqn),
        source=compat.relative(compat.source_of(eqn)),
    )
