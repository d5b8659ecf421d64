"""Small stage problems, and every plan of them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from experiments.planners.stages import Stages, replay, stages_of_nodes


def random_stages(draw: random.Random, most: int = 7) -> Stages:
    """Up to `most` nodes and a budget between what a single node needs, or one byte less, and what keeping takes."""
    count = draw.randint(2, most)
    inputs = [sorted(draw.sample(range(node), min(node, draw.choice([0, 1, 1, 2, 2, 3])))) for node in range(count)]
    nbytes = [draw.choice([1, 1, 2, 3, 5, 9]) for _ in range(count)]
    ticks = [draw.randint(0, 9) for _ in range(count)]
    free = stages_of_nodes(nbytes, ticks, inputs, 0)
    least, most_bytes = max(free.least_nbytes), replay(free, ()).peak_nbytes
    return stages_of_nodes(
        nbytes, ticks, inputs, draw.randint(least - (draw.random() < 0.2), max(least, most_bytes - 1))
    )


def least_extra_ticks(stages: Stages) -> int | None:
    """Over all sequences of computations whatever: Dijkstra over (what is held, how many have run). None: none fits."""
    count, ticks = stages.count, [own or 0 for own in stages.ticks]
    least: dict[tuple[int, int], int] = {(0, 0): 0}
    queue = [(0, 0, 0)]
    while queue:
        spent, held, run = heapq.heappop(queue)
        if least[held, run] < spent:
            continue
        if run == count:
            return spent - sum(stages.own_ticks)
        for later, cost, then in _next(stages, ticks, held, run):
            if spent + cost < least.get((later, then), spent + cost + 1):
                least[later, then] = spent + cost
                heapq.heappush(queue, (spent + cost, later, then))
    return None


def _next(stages: Stages, ticks: Sequence[int], held: int, run: int) -> list[tuple[int, int, int]]:
    found = []
    for node in range(min(run + 1, stages.count)):
        if held >> node & 1:
            found.append((held & ~(1 << node), 0, run))
        elif all(held >> source & 1 for source in stages.inputs[node]):
            nbytes = sum(size for other, size in enumerate(stages.nbytes) if held >> other & 1)
            if nbytes + stages.nbytes[node] <= stages.budget_bytes:
                found.append((held | 1 << node, ticks[node], run + (node == run)))
    return found
