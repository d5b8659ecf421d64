"""The order in which operations first run: the program's own, with loose ends run as soon as they can.

A *loose end* is an operation that no main computation waits for: a weight gradient, an optimizer update, a running
statistic, a metric. Running it early ends the lifetimes of what it reads; nothing is paid for it. Where it reads only
arguments (the decay of an optimizer's moments) no lifetime would end and one would begin: such an *idle* operation runs
right before what needs it. One that waits for other devices would let all else wait: it runs at the end.
"""

from __future__ import annotations

import heapq

from memplan.planning.graph import Graph, Op


def early_loose_ends(graph: Graph) -> tuple[int, ...]:
    """Op ids in an order that respects dependencies; an argument's readers stay before the update that reuses it."""
    waits = _waits(graph)
    loose = _loose_ends(graph)
    idle = _idle(waits, loose)
    late = _late(graph, loose)
    waiting = [sum(not idle[earlier] for earlier in before) for before in waits]
    followers: list[list[int]] = [[] for _ in graph.ops]
    for op, before in enumerate(waits):
        for earlier in before:
            followers[earlier].append(op)
    order: list[int] = []
    done = [False] * len(graph.ops)
    soon = [loose[op] and not idle[op] and not late[op] for op in range(len(graph.ops))]
    ready: list[int] = [op for op in range(len(graph.ops)) if soon[op] and not waiting[op]]
    heapq.heapify(ready)

    def run(op: int) -> None:
        for earlier in sorted(waits[op]):
            if idle[earlier] and not done[earlier]:
                run(earlier)
        order.append(op)
        done[op] = True
        for follower in followers[op] if not idle[op] else ():
            waiting[follower] -= 1
            if not waiting[follower] and soon[follower]:
                heapq.heappush(ready, follower)

    for op in range(len(graph.ops)):
        while ready:
            run(heapq.heappop(ready))
        if not done[op] and not loose[op]:
            run(op)
    while ready:
        run(heapq.heappop(ready))
    for op in range(len(graph.ops)):  # late ones, and idle ones that only outputs need
        if not done[op]:
            run(op)
    return tuple(order)


def _waits(graph: Graph) -> list[set[int]]:
    """Ops that must run before each op: producers, readers of a buffer about to be overwritten, effects in order."""
    waits: list[set[int]] = [set() for _ in graph.ops]
    effects: int | None = None
    for index, op in enumerate(graph.ops):
        waits[index].update(made for value in op.inputs if (made := graph.producer[value]) is not None)
        if not op.recomputable:
            if effects is not None:
                waits[index].add(effects)
            effects = index
    for output, argument in graph.reused.items():
        update = graph.producer[output]
        if update is not None:
            # a reader that itself depends on the update cannot go first; program order tells
            waits[update].update(reader for reader in _buffer_readers(graph, argument) if reader < update)
    return waits


def _buffer_readers(graph: Graph, value: int) -> set[int]:
    """Ops that read a value's buffer, directly or through views."""
    found: set[int] = set()
    waiting = [value]
    while waiting:
        for reader in graph.readers[waiting.pop()]:
            if reader not in found and graph.ops[reader].fusion == "view":
                waiting.extend(graph.ops[reader].outputs)
            found.add(reader)
    return found


def _loose_ends(graph: Graph) -> list[bool]:
    """True where no kernel of the main computation follows."""
    loose = [False] * len(graph.ops)
    blocked = [False] * len(graph.ops)  # some descendant is a kernel
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        after = [reader for value in op.outputs for reader in graph.readers[value]]
        blocked[index] = any(blocked[reader] or _is_work(graph.ops[reader]) for reader in after)
        loose[index] = not blocked[index] and op.recomputable
    return loose


def _late(graph: Graph, loose: list[bool]) -> list[bool]:
    """True for loose ends that other devices have a part in."""
    late = [False] * len(graph.ops)
    from_others: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.communicates or not from_others.isdisjoint(op.inputs):
            from_others.update(op.outputs)
            late[index] = loose[index]
    return late


def _is_work(op: Op) -> bool:
    return op.fusion == "kernel" and not op.crosses_memories


def _idle(waits: list[set[int]], loose: list[bool]) -> list[bool]:
    """True for loose ends that wait for nothing, or for other such operations only."""
    idle = [False] * len(waits)
    for op, before in enumerate(waits):
        idle[op] = loose[op] and all(idle[earlier] for earlier in before)
    return idle
