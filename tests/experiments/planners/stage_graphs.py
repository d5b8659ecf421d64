"""Small stage problems, and their optimum by exhaustive search."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from experiments.planners.stages import Stages, replay, stages_of_nodes


def random_stages(draw: random.Random, max_nodes: int = 7) -> Stages:
    """Up to `max_nodes` nodes; a budget from just below the minimum to what keeping all takes."""
    count = draw.randint(2, max_nodes)
    inputs = [
        sorted(draw.sample(range(node), min(node, draw.choice([0, 1, 1, 2, 2, 3]))))
        for node in range(count)
    ]
    nbytes = [draw.choice([1, 1, 2, 3, 5, 9]) for _ in range(count)]
    ticks = [draw.randint(0, 9) for _ in range(count)]
    free = stages_of_nodes(nbytes, ticks, inputs, 0)
    floor_bytes, most_bytes = max(free.least_nbytes), replay(free, ()).peak_nbytes
    return stages_of_nodes(
        nbytes,
        ticks,
        inputs,
        draw.randint(floor_bytes - (draw.random() < 0.2), max(floor_bytes, most_bytes - 1)),
    )


def least_extra_ticks(stages: Stages) -> int | None:
    """The optimum by Dijkstra over (live nodes, count of nodes that ran); None: nothing fits."""
    count, ticks = stages.count, [own or 0 for own in stages.ticks]
    distances: dict[tuple[int, int], int] = {(0, 0): 0}
    queue = [(0, 0, 0)]
    while queue:
        spent, live, run = heapq.heappop(queue)
        if distances[live, run] < spent:
            continue
        if run == count:
            return spent - sum(stages.own_ticks)
        for later, cost, then in _next(stages, ticks, live, run):
            if spent + cost < distances.get((later, then), spent + cost + 1):
                distances[later, then] = spent + cost
                heapq.heappush(queue, (spent + cost, later, then))
    return None


def _next(stages: Stages, ticks: Sequence[int], live: int, run: int) -> list[tuple[int, int, int]]:
    successors = []
    for node in range(min(run + 1, stages.count)):
        if live >> node & 1:
            successors.append((live & ~(1 << node), 0, run))
        elif all(live >> source & 1 for source in stages.inputs[node]):
            nbytes = sum(size for item, size in enumerate(stages.nbytes) if live >> item & 1)
            if nbytes + stages.nbytes[node] <= stages.budget_bytes:
                successors.append((live | 1 << node, ticks[node], run + (node == run)))
    return successors
