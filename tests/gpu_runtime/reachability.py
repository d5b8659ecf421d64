"""The order of a log by brute force: a graph of operations, and all that each can be reached from. For small logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.gpu_runtime.operations import Kind, Op


def ancestors(ops: Sequence[Op]) -> list[int]:
    """Of every operation, bits of those that are over before it begins."""
    above: list[int] = []
    streams = defaultdict[int, list[int]](list)  # all that a stream was given
    seen = defaultdict[int, set[int]](set)  # what a thread has seen the end of
    at: dict[int, int] = {}  # numbers of operations -> positions
    recorded: dict[int, int] = {}
    nodes: dict[tuple[int | None, int], int] = {}

    def with_ancestors(positions: Iterable[int]) -> int:
        bits = 0
        for position in positions:
            bits |= above[position] | 1 << position
        return bits

    for position, op in enumerate(ops):
        before: set[int] = set()
        if op.kind is Kind.SEEN:
            seen[op.thread].add(recorded[op.mark])
        elif op.kind is Kind.SYNC:
            seen[op.thread].update(one for one in streams[op.stream] if ops[one].number <= op.number)
        elif op.after_nodes:
            before = {nodes[op.launch, node] for node in op.after_nodes}
        else:
            before = {*streams[op.stream], *seen[op.thread], *(at[number] for number in op.after)}
            if op.kind is Kind.WAIT:
                before.add(recorded[op.mark])
        above.append(with_ancestors(before))
        if op.kind in (Kind.WORK, Kind.RECORD, Kind.WAIT):
            streams[op.stream].append(position)
            at[op.number], nodes[op.launch, op.node] = position, position
        if op.kind is Kind.RECORD:
            recorded[op.mark] = position
    return above


def racing_bytes(ops: Sequence[Op]) -> set[int]:
    """Addresses with two accesses, one of them a write, by operations neither of which is over before the other."""
    above, found = ancestors(ops), set[int]()
    accesses = [(position, access) for position, op in enumerate(ops) for access in op.accesses]
    for one, first in accesses:
        for other, second in accesses:
            if one < other and (first.write or second.write) and not above[other] >> one & 1:
                found.update(range(max(first.start, second.start), min(first.stop, second.stop)))
    return found
