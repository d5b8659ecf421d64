"""Elementwise work moved behind a fence.

Where a heavy kernel runs again inside a segment, a fence parts the segment. Elementwise work before the fence whose
readers come after it would have to be written to memory; behind the fence it melts into them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memplan.planning.layout import Layout


def delayed(layout: Layout, ops: Sequence[int], lasting: Collection[int]) -> list[int]:
    """The ops of a segment in an order where fewer bytes cross the fences inside it.

    Args:
      ops: in running order; every heavy one but the first starts behind a fence.
      lasting: values that are needed after the segment.
    """
    order = list(ops)
    heavy = [position for position, op in enumerate(order) if layout.is_heavy(op)]
    start = 0
    for fence in heavy[1:]:
        rest, op = order[start:fence], order[fence]
        movable = _movable(layout, rest, op)
        if _is_worth_moving(layout, movable, order[fence + 1 :], lasting):
            order[start : fence + 1] = [*(o for o in rest if o not in movable), op, *(o for o in rest if o in movable)]
            start = fence + 1 - len(movable)
        else:
            start = fence + 1
    return order


def _movable(layout: Layout, ops: Sequence[int], last: int) -> set[int]:
    """Elementwise ops that neither `last` needs nor what has to stay before it."""
    read = set(layout.carriers[last])
    found: set[int] = set()
    for op in reversed(ops):
        known = layout.graph.ops[op]
        if known.fusion == "elementwise" and read.isdisjoint(known.outputs):
            found.add(op)
        else:
            read.update(layout.carriers[op])
    return found


def _is_worth_moving(layout: Layout, movable: set[int], after: Sequence[int], lasting: Collection[int]) -> bool:
    """Do the values that they read have fewer bytes than what they make, counting only what would not be there?"""
    graph = layout.graph
    needed = {value for op in after for value in layout.carriers[op]}.union(lasting)
    made = {value for op in movable for value in graph.ops[op].outputs}
    read = {value for op in movable for value in layout.carriers[op]} - made
    return sum(map(graph.nbytes, read - needed)) < sum(map(graph.nbytes, made & needed))
