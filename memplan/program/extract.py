"""Program -> Graph: every equation an operation with its costs, every variable a value with its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from memplan.planning.graph import Graph, Op, Role, Value
from memplan.program import compat, rules
from memplan.program.placement import share
from memplan.program.trace import Program, flatten


def extract(program: Program) -> Graph:
    """The graph of a program; op ids are equation indices, value ids those of `variables`."""
    shares = {var: share(var.aval, sharding) for var, sharding in program.placements.items()}
    return graph_of(program.jaxpr, program.names, program.donated, shares, program.on_host)


def variables(closed: compat.ClosedJaxpr) -> list[Any]:
    """The variables of a flat jaxpr by value id: inputs, constants, results of equations."""
    made = (var for eqn in closed.jaxpr.eqns for var in eqn.outvars)
    return [*closed.jaxpr.invars, *(var for var, _ in compat.consts_of(closed)), *made]


def graph_of(
    closed: compat.ClosedJaxpr,
    names: Sequence[str],
    donated: Sequence[bool],
    shares: Mapping[Any, float] = MappingProxyType({}),
    on_host: Collection[int] = (),
) -> Graph:
    """The graph of a flat jaxpr.

    Args:
      names, donated: of its inputs.
      on_host: positions of inputs in host memory.
      shares: the part of a variable that one device holds, where that is not all of it.
    """
    jaxpr = closed.jaxpr
    values: list[Value] = []
    ids: dict[Any, int] = {}

    def add(var: Any, name: str, role: Role, donated: bool = False, nbytes: int | None = None) -> int:
        aval = var.aval
        known = int(shares.get(var, 1.0) * compat.nbytes_of(aval)) if nbytes is None else nbytes
        known = 0 if compat.is_on_host(var) else known
        shape, dtype = tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval))
        values.append(Value(name, known, shape, dtype, role, donated))
        ids[var] = len(values) - 1
        return ids[var]

    for position, (var, name, given) in enumerate(zip(jaxpr.invars, names, donated, strict=True)):
        add(var, name, "argument", given, 0 if position in on_host else None)
    for number, (var, _) in enumerate(compat.consts_of(closed)):
        add(var, f"constant:{number}", "constant")
    inputs = tuple(range(len(values)))

    ops = []
    awaited: set[int] = set()  # values that come from other devices
    for eqn in jaxpr.eqns:
        fusion = rules.fusion_of(eqn)
        outputs = []
        for var in eqn.outvars:
            unread = isinstance(var, compat.DropVar) and fusion != "kernel"
            outputs.append(
                add(var, f"{eqn.primitive.name}:{len(values)}", "intermediate", nbytes=0 if unread else None)
            )
        inputs_read = tuple(ids[atom] for atom in eqn.invars if compat.is_var(atom))
        part = min((shares.get(atom, 1.0) for atom in (*eqn.invars, *eqn.outvars) if compat.is_var(atom)), default=1.0)
        op = _op(eqn, inputs_read, tuple(outputs), part)
        tied = op.name == "optimization_barrier" and not awaited.isdisjoint(op.inputs)
        if op.name in rules.COLLECTIVES or tied:
            awaited.update(op.outputs)
            op = replace(op, communicates=True)
        ops.append(op)
    returned = tuple(ids[atom] for atom in jaxpr.outvars if compat.is_var(atom))
    return Graph(tuple(values), tuple(ops), inputs, returned, _fingerprint(values, ops, returned))


def body_graph(flat: compat.ClosedJaxpr) -> Graph:
    """The graph of a flat loop body or branch."""
    return graph_of(flat, compat.input_names(flat), [False] * len(flat.jaxpr.invars))


def _op(eqn: compat.JaxprEqn, inputs: tuple[int, ...], outputs: tuple[int, ...], part: float) -> Op:
    """The operation as one device runs it, which has `part` of its most divided operand or result."""
    why_not = rules.why_not_recomputable(eqn)
    return Op(
        name=eqn.primitive.name,
        inputs=inputs,
        outputs=outputs,
        flops=part * rules.flops_of(eqn),
        flops_dtype=rules.matrix_dtype(eqn),
        fusion=rules.fusion_of(eqn),
        along_rows=rules.is_along_rows(eqn),
        workspace_nbytes=int(part * rules.workspace_of(eqn)),
        bodies=tuple(body_graph(flatten(body)) for body in compat.control_bodies(eqn)) if part == 1.0 else (),
        crosses_memories=compat.crosses_memories(eqn),
        traffic_nbytes=int(part * rules.traffic_of(eqn)),
        recomputable=not why_not,
        why_not=why_not,
        source=compat.relative(compat.source_of(eqn)),
        scope=compat.scope_of(eqn),
    )


def _fingerprint(values: list[Value], ops: list[Op], returned: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{value.shape}{value.dtype}{value.donated};".encode())
    for op in ops:
        digest.update(f"{op.name}{op.inputs}{op.outputs}{op.flops};".encode())
    digest.update(repr(returned).encode())
    return digest.hexdigest()[:32]
