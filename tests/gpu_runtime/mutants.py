"""Logs with one order less: what a driver would have been told by a program that forgot it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.gpu_runtime.operations import Kind, Op

Mutant = list[Op]


def mutants(ops: Sequence[Op]) -> Iterator[tuple[str, Mutant]]:
    """Every way to lose one order of a log, with a word for the way."""
    words = {
        Kind.WAIT: "a wait is dropped",
        Kind.SYNC: "a synchronization is dropped",
        Kind.SEEN: "an event is not waited for",
    }
    following: dict[int, int] = {}  # stream -> position of the operation behind this one
    for position in reversed(range(len(ops))):
        op = ops[position]
        if op.kind in words:
            yield words[op.kind], [*ops[:position], *ops[position + 1 :]]
        if op.kind not in (Kind.WORK, Kind.WAIT, Kind.RECORD):
            continue
        behind = following.get(op.stream)
        following[op.stream] = position
        if op.launch is not None:
            for node in op.after_nodes:
                predecessors = tuple(
                    predecessor for predecessor in op.after_nodes if predecessor != node
                )
                yield (
                    "a dependency in a graph is dropped",
                    _with(ops, position, replace(op, after_nodes=predecessors or (0,))),
                )
        elif op.kind is Kind.WORK and op.accesses:
            yield (
                "work is given to another stream",
                _with(ops, position, replace(op, stream=_NOBODYS)),
            )
        if behind is not None and op.launch is None and ops[behind].launch is None:
            kinds = op.kind, ops[behind].kind
            if kinds == (Kind.WORK, Kind.RECORD):
                yield "an event is recorded too early", _exchanged(ops, position, behind)
            if kinds == (Kind.WAIT, Kind.WORK):
                yield "work begins before the wait for it", _exchanged(ops, position, behind)


_NOBODYS = 1000  # a stream that has no other work


def _with(ops: Sequence[Op], position: int, op: Op) -> Mutant:
    return [*ops[:position], op, *ops[position + 1 :]]


def _exchanged(ops: Sequence[Op], first: int, second: int) -> Mutant:
    """Two operations of one stream in the other order; whoever has seen the end of the second has seen both's."""
    mutant = list(ops)
    mutant[first] = replace(ops[second], number=ops[first].number)
    mutant[second] = replace(ops[first], number=ops[second].number)
    return mutant
