"""Program -> Graph: every equation an operation with its costs, every variable a value with its bytes."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from memplan.planning.graph import Graph, Op, Role, Value
from memplan.program import compat, rules
from memplan.program.trace import Program


def extract(program: Program) -> Graph:
    """The graph of a program; op ids are equation indices, value ids follow inputs, then equation outputs."""
    jaxpr = program.jaxpr.jaxpr
    values: list[Value] = []
    ids: dict[Any, int] = {}

    def add(var: Any, name: str, role: Role, donated: bool = False, nbytes: int | None = None) -> int:
        aval = var.aval
        known = compat.nbytes_of(aval) if nbytes is None else nbytes
        shape, dtype = tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval))
        values.append(Value(name, known, shape, dtype, role, donated))
        ids[var] = len(values) - 1
        return ids[var]

    for var, name, donated, sharding in zip(
        jaxpr.invars, program.names, program.donated, program.input_shardings, strict=True
    ):
        add(var, name, "argument", donated, _shard_nbytes(var.aval, sharding))
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
        ops.append(_op(eqn, tuple(ids[atom] for atom in eqn.invars if _is_var(atom)), tuple(outputs)))
    returned = tuple(ids[atom] for atom in jaxpr.outvars if _is_var(atom))
    return Graph(tuple(values), tuple(ops), inputs, returned, _fingerprint(values, ops, returned))


def _op(eqn: compat.JaxprEqn, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    why_not = rules.why_not_recomputable(eqn)
    return Op(
        name=eqn.primitive.name,
        inputs=inputs,
        outputs=outputs,
        flops=rules.flops_of(eqn),
        flops_dtype=rules.matrix_dtype(eqn),
        fusion=rules.fusion_of(eqn),
        workspace_nbytes=rules.workspace_of(eqn),
        traffic_nbytes=rules.traffic_of(eqn),
        recomputable=not why_not,
        why_not=why_not,
        source=_short(compat.source_of(eqn)),
        scope=compat.scope_of(eqn),
    )


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, compat.Literal)


def _shard_nbytes(aval: Any, sharding: Any) -> int:
    """Bytes of one device's part of an argument."""
    whole = compat.nbytes_of(aval)
    if sharding is None or not getattr(aval, "shape", ()):
        return whole
    part = sharding.shard_shape(aval.shape)
    return whole * _product(part) // max(1, _product(aval.shape))


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result


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
