"""Graphs for planners: published node-link JSON, and random layered graphs.

The random graphs follow Gagrani et al., "Neural Topological Ordering for Computation Graphs"
(2022): layers of random width, edges mostly to the next layer and rarely further, random sizes and
durations.
"""

import heapq
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

_LATENESS = 4.0  # how many layers later than its own a node may run


@dataclass(frozen=True)
class NodeGraph:
    """A computation graph in the order of first computation."""

    names: tuple[int, ...]  # node ids in the file
    nbytes: tuple[int, ...]  # of outputs
    ticks: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]  # positions that each node reads


def read(path: Path) -> NodeGraph:
    """Read a node-link file of either schema. ValueError: its order does not respect the links."""
    document = json.loads(path.read_text())
    layered = "out_cost" in document["nodes"][0]
    name, size, duration = (
        ("name", "out_cost", "duration") if layered else ("id", "cost_ram", "cost_cpu")
    )
    source, target = ("0", "1") if layered else ("source", "target")
    nodes = {node[name]: node for node in document["nodes"]}
    listed = document["graph"].get("order") or []
    order = [*listed, *sorted(set(nodes) - set(listed))]
    place = {node: position for position, node in enumerate(order)}
    inputs: list[set[int]] = [set() for _ in order]
    for link in document["links"]:
        inputs[place[link[target]]].add(place[link[source]])
    if len(place) != len(nodes) or any(
        position <= max(positions, default=-1) for position, positions in enumerate(inputs)
    ):
        raise ValueError(f"{path}: the given order does not respect the links")
    nbytes, ticks = (
        tuple(int(nodes[node][figure]) for node in order) for figure in (size, duration)
    )
    return NodeGraph(
        tuple(order), nbytes, ticks, tuple(tuple(sorted(positions)) for positions in inputs)
    )


def random_layered(count: int, seed: int = 0) -> dict[str, object]:
    """A random layered graph, in random order, in the schema with `out_cost` and `duration`.

    Parameters are fitted to the published graphs: neighbouring layers are linked with probability
    0.2, every second node also reads from a layer further back, and every node reads and is read.
    Layers are 0.75 sqrt(count) wide on average, at most 30.
    """
    draw = random.Random(seed)
    width = min(30.0, max(2.0, 0.75 * math.sqrt(count)))
    layers: list[list[int]] = [[0]]
    placed = 1
    while placed < count - 1:
        size = min(count - 1 - placed, draw.randint(2, round(2 * width) - 2))
        layers.append(list(range(placed, placed + size)))
        placed += size
    layers.append([count - 1])
    links: set[tuple[int, int]] = set()
    for depth, layer in enumerate(layers[1:], 1):
        for node in layer:
            links.update((source, node) for source in layers[depth - 1] if draw.random() < 0.2)
            links.add((draw.choice(layers[depth - 1]), node))
            if depth > 2 and draw.random() < 0.5:
                links.add((draw.choice(layers[draw.randint(max(0, depth - 15), depth - 2)]), node))
    read_by = {source for source, _ in links}
    for depth, layer in enumerate(layers[:-1]):
        for node in layer:
            if node not in read_by:
                links.add((node, draw.choice(layers[depth + 1])))
    order = _ready_order(layers, links, draw)
    names = {node: position for position, node in enumerate(order)}
    nodes = []
    for name in range(count):
        size = 10 + 10 * int(500 * draw.random() ** 1.6)
        nodes.append(
            {"name": name, "out_cost": size, "param_cost": 0, "duration": draw.randint(1, 1000)}
        )
    return {
        "directed": True, "multigraph": False,
        "graph": {"name": f"layered_{count}_{seed}", "order": list(range(count))}, "nodes": nodes,
        "links": [{"0": names[source], "1": names[target]} for source, target in sorted(links)],
    }  # fmt: skip


def _ready_order(
    layers: list[list[int]], links: set[tuple[int, int]], draw: random.Random
) -> list[int]:
    """An order of computation, layer by layer, in which a node may wait for a few layers."""
    wish = {
        node: depth + _LATENESS * draw.random()
        for depth, layer in enumerate(layers)
        for node in layer
    }
    after: list[list[int]] = [[] for _ in wish]
    missing = [0] * len(wish)
    for source, target in sorted(links):
        after[source].append(target)
        missing[target] += 1
    ready = [(wish[node], node) for node in sorted(wish) if not missing[node]]
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (wish[target], target))
    return order
