"""Program -> Graph: every equation an operation with its costs, every variable a value with its bytes."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from memplan.planning.graph import Graph, Op, Role, Value
from memplan.program import compat, rules
from memplan.program.placement import share
from memplan.program.trace import Program


def extract(program: Program) -> Graph:
    """The graph of a program; op ids are equation indices, value ids follow inputs, then equation outputs."""
    jaxpr = program.jaxpr.jaxpr
    values: list[Value] = []
    ids: dict[Any, int] = {}

    shares = {var: share(var.aval, sharding) for var, sharding in program.placements.items()}

    def add(var: Any, name: str, role: Role, donated: bool = False, nbytes: int | None = None) -> int:
        aval = var.aval
        known = int(shares.get(var, 1.0) * compat.nbytes_of(aval)) if nbytes is None else nbytes
        shape, dtype = tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval))
        values.append(Value(name, known, shape, dtype, role, donated))
        ids[var] = len(values) - 1
        return ids[var]

    for var, name, donated in zip(jaxpr.invars, program.names, program.donated, strict=True):
        add(var, name, "argument", donated)
    for number, (var, _) in enumerate(compat.consts_of(program.jaxpr)):
        add(var, f"constant:{number}", "constant")
    inputs = tuple(range(len(values)))

    ops = []
    for eqn in jaxpr.eqns:
        fusion = rules.fusion_of(eqn)
        outputs = []
        for var in eqn.outvars:
            unread = isinstance(var, compat.DropVar) and fusion != "kernel"
            outputs.append(
                add(var, f"{eqn.primitive.name}:{len(values)}", "intermediate", nbytes=0 if unread else None)
            )
        inputs_read = tuple(ids[atom] for atom in eqn.invars if _is_var(atom))
        part = min((shares.get(atom, 1.0) for atom in (*eqn.invars, *eqn.outvars) if _is_var(atom)), default=1.0)
        ops.append(_op(eqn, inputs_read, tuple(outputs), part))
    returned = tuple(ids[atom] for atom in jaxpr.outvars if _is_var(atom))
    return Graph(tuple(values), tuple(ops), inputs, returned, _fingerprint(values, ops, returned))


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
        traffic_nbytes=int(part * rules.traffic_of(eqn)),
        recomputable=not why_not,
        why_not=why_not,
        source=_short(compat.source_of(eqn)),
        scope=compat.scope_of(eqn),
    )


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, compat.Literal)


def _short(source: str) -> str:
    """Paths below the working directory are shown relative to it."""
    here = os.getcwd() + os.sep
    return source[len(here) :] if source.startswith(here) else source


def _fingerprint(values: list[Value], ops: list[Op], returned: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{value.shape}{value.dtype}{value.donated};".encode())
    for op in ops:
        digest.update(f"{op.name}{op.inputs}{op.outputs}{op.flops};".encode())
    digest.update(repr(returned).encode())
    return digest.hexdigest()[:32]
