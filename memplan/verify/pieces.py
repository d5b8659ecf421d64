"""A flat jaxpr run a few equations at a time, loops trip by trip: what recompilation alone does to the numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.interpret import bindings, interpret_eqns


def run_in_pieces(
    closed: compat.ClosedJaxpr, inputs: Sequence[Any], length: int, flags: Mapping[str, Any]
) -> list[Any]:
    """Outputs of a flat jaxpr; see `in_pieces`."""
    return in_pieces(closed, length, flags)(inputs)


def in_pieces(
    closed: compat.ClosedJaxpr, length: int, flags: Mapping[str, Any]
) -> Callable[[Sequence[Any]], list[Any]]:
    """A flat jaxpr, no more than `length` equations of it compiled together, nor two trips of a loop; compiled once.

    Args:
      flags: `compiler_options` of every piece.
    """
    return _Runner(closed, length, flags).run


@dataclass(frozen=True)
class _Piece:
    """A few equations, compiled once; or a loop, its body in pieces."""

    # invars, outvars: what it reads; what it defines and others read
    invars: Sequence[Any]
    outvars: Sequence[Any]
    run: Callable[[Sequence[Any]], Sequence[Any]]  # results from operands


class _Runner:
    def __init__(self, closed: compat.ClosedJaxpr, length: int, flags: Mapping[str, Any]):
        self.closed = closed
        self.pieces = _pieces(closed, length, flags)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        known, outputs = bindings(self.closed, inputs), self.closed.jaxpr.outvars
        return interpret_eqns(self.pieces, known, outputs, lambda piece, operands: piece.run(operands), nullcontext)


def _pieces(closed: compat.ClosedJaxpr, length: int, flags: Mapping[str, Any]) -> list[_Piece]:
    """The equations in groups; every loop stands alone."""
    wanted = _variables(closed.jaxpr.outvars)
    found: list[_Piece] = []
    for group in reversed(list(_groups(closed.jaxpr.eqns, length))):
        scan = compat.scan_of(group[0])
        if scan is not None:
            body = _Runner(flatten(scan.body), length, flags)
            found.append(_Piece(group[0].invars, group[0].outvars, functools.partial(_trips, scan, body)))
        else:
            made = {var for eqn in group for var in eqn.outvars}
            reads = {var for eqn in group for var in _variables(eqn.invars)} - made
            found.append(_compiled(group, list(reads), list(made & wanted), flags))
        wanted |= _variables(found[-1].invars)
    return found[::-1]


def _groups(eqns: Sequence[compat.JaxprEqn], length: int) -> Iterator[list[compat.JaxprEqn]]:
    group: list[compat.JaxprEqn] = []
    for eqn in eqns:
        alone = compat.scan_of(eqn) is not None
        if group and (alone or len(group) == length):
            yield group
            group = []
        if alone:
            yield [eqn]
        else:
            group.append(eqn)
    if group:
        yield group


def _compiled(
    eqns: Sequence[compat.JaxprEqn], invars: Sequence[Any], outvars: Sequence[Any], flags: Mapping[str, Any]
) -> _Piece:
    def run(operands: Sequence[Any]) -> list[Any]:
        return interpret_eqns(eqns, dict(zip(invars, operands, strict=True)), outvars)

    return _Piece(invars, outvars, jax.jit(run, compiler_options=dict(flags)))


def _trips(scan: compat.Scan, body: _Runner, operands: Sequence[Any]) -> list[Any]:
    consts, carries, stacks = scan.split(operands)
    made: dict[int, list[Any]] = {}
    for trip in reversed(range(scan.trips)) if scan.reverse else range(scan.trips):
        results = body.run([*consts, *carries, *(stack[trip] for stack in stacks)])
        carries, made[trip] = results[: scan.carries], results[scan.carries :]
    if not made:
        slices = [
            jax.numpy.zeros((0, *aval.shape), aval.dtype)
            for aval in map(compat.aval_of, body.closed.jaxpr.outvars[scan.carries :])
        ]
        return [*carries, *slices]
    return [
        *carries,
        *(jax.numpy.stack(column) for column in zip(*(made[trip] for trip in range(scan.trips)), strict=True)),
    ]


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return set(filter(compat.is_var, atoms))
