"""A flat jaxpr run a few equations at a time, loops trip by trip: what recompilation alone does to the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from memplan.program import compat
from memplan.program.trace import flatten


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


@dataclass
class _Piece:
    """A few equations, compiled once."""

    eqns: list[Any]
    reads: list[Any]
    makes: list[Any]
    flags: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.call = jax.jit(self._evaluate, compiler_options=dict(self.flags))

    def _evaluate(self, values: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.reads, values, strict=True))
        for eqn in self.eqns:
            operands = [compat.read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, compat.bind(eqn, operands), strict=True))
        return [env[var] for var in self.makes]


@dataclass
class _Runner:
    closed: compat.ClosedJaxpr
    length: int
    flags: Mapping[str, Any]
    pieces: list[Any] = field(default_factory=list)  # pieces, and equations that are loops with their bodies

    def __post_init__(self) -> None:
        """Group the equations; every loop stands alone."""
        groups: list[list[Any]] = [[]]
        for eqn in self.closed.jaxpr.eqns:
            if compat.scan_of(eqn) is not None:
                groups += [[eqn], []]
            elif len(groups[-1]) == self.length:
                groups.append([eqn])
            else:
                groups[-1].append(eqn)
        wanted = _variables(self.closed.jaxpr.outvars)
        for group in filter(None, reversed(groups)):
            scan = compat.scan_of(group[0])
            made = {var for eqn in group for var in eqn.outvars}
            if scan is not None:
                self.pieces.append((group[0], scan, _Runner(flatten(scan.body), self.length, self.flags)))
                reads = _variables(group[0].invars)
            else:
                reads = {var for eqn in group for var in _variables(eqn.invars)} - made
                self.pieces.append(_Piece(group, list(reads), list(made & wanted), self.flags))
            wanted |= reads
        self.pieces.reverse()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(compat.consts_of(self.closed))
        env.update(zip(self.closed.jaxpr.invars, inputs, strict=True))

        for piece in self.pieces:
            if isinstance(piece, _Piece):
                env.update(zip(piece.makes, piece.call([env[var] for var in piece.reads]), strict=True))
            else:
                eqn, scan, body = piece
                env.update(
                    zip(eqn.outvars, _trips(scan, body, [compat.read(env, atom) for atom in eqn.invars]), strict=True)
                )
        return [compat.read(env, atom) for atom in self.closed.jaxpr.outvars]


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
    return {atom for atom in atoms if not isinstance(atom, compat.Literal)}
