"""The order of a log by brute force: a graph of operations, and all that each can be reached from. For small logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tests.gpu_runtime.operations import Kind, Op


def ancestors(ops: Sequence[Op]) -> list[int]:
    """Of every operation, bits of those that are over before it begins."""
    above: list[int] = []
    streams = defaultdict[int, list[int]](list)  # all that a stream was given
    ends_by_thread = defaultdict[int, set[int]](set)  # what a thread has seen the end of
    common_ends: set[int] = set()  # what all have
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
            ends_by_thread[op.thread].add(recorded[op.mark])
        elif op.kind in (Kind.SYNC, Kind.TOLD):
            who = common_ends if op.kind is Kind.TOLD else ends_by_thread[op.thread]
            who.update(
                candidate for candidate in streams[op.stream] if ops[candidate].number <= op.number
            )
        elif op.after_nodes:
            before = {nodes[op.launch, node] for node in op.after_nodes}
        else:
            before = {
                *streams[op.stream],
                *ends_by_thread[op.thread],
                *common_ends,
                *(at[number] for number in op.after),
            }
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
    above = ancestors(ops)
    return {
        byte
        for first, second, start, stop in conflicts(ops)
        if not above[second] >> first & 1
        for byte in range(start, stop)
    }


def has_race(ops: Sequence[Op]) -> bool:
    above = ancestors(ops)
    return any(not above[second] >> first & 1 for first, second, _, _ in conflicts(ops))


def conflicts(ops: Sequence[Op]) -> list[tuple[int, int, int, int]]:
    """Positions of two operations that access bytes [start, stop), one of them writing: all pairs are looked at."""
    owner = np.array([position for position, op in enumerate(ops) for _ in op.accesses])
    accesses = [access for op in ops for access in op.accesses]
    write = np.array([access.write for access in accesses])
    start = np.array([access.start for access in accesses])
    stop = np.array([access.stop for access in accesses])
    pairs = []
    for number in range(len(accesses)):
        meets = (
            (owner > owner[number])
            & (write | write[number])
            & (start < stop[number])
            & (stop > start[number])
        )
        for partner in np.flatnonzero(meets):
            both = max(start[number], start[partner]), min(stop[number], stop[partner])
            pairs.append((int(owner[number]), int(owner[partner]), int(both[0]), int(both[1])))
    return pairs
