"""Judges an order of computation by the definition of the task, sharing no code with the planners.

python -m experiments.planners.validate GRAPH.json ANSWER.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """An order of computation, replayed."""

    peak: int  # bytes
    duration: int
    first: tuple[int, ...]  # the order of first computations


def measure(document: Mapping, order: Sequence[int]) -> Measured:
    """Replay node ids. ValueError: a node runs before its inputs, or never."""
    nodes = document["nodes"]
    key = "id" if "id" in nodes[0] else "name"
    nbytes = {node[key]: node.get("cost_ram", node.get("out_cost")) for node in nodes}
    duration = {node[key]: node.get("cost_cpu", node.get("duration")) for node in nodes}
    reads: dict[int, set[int]] = {node: set() for node in nbytes}
    for link in document["links"]:
        reads[link.get("target", link.get("1"))].add(link.get("source", link.get("0")))
    if set(order) != set(nbytes):
        raise ValueError(f"{len(set(nbytes) ^ set(order))} nodes are missing or unknown")
    done: set[int] = set()
    for node in order:
        if not reads[node] <= done:
            raise ValueError(f"node {node} runs before {sorted(reads[node] - done)}")
        done.add(node)
    peak, later = 0, set()  # `later`: outputs that are read later, before being recomputed
    for node in reversed(order):
        live = (later - {node}) | reads[node]
        peak = max(peak, nbytes[node] + sum(nbytes[value] for value in live))
        later = live
    return Measured(peak, sum(duration[node] for node in order), tuple(dict.fromkeys(order)))


if __name__ == "__main__":
    document, claimed = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    measured = measure(document, claimed["order"])
    right = (measured.peak, measured.duration) == (
        claimed["peak"],
        claimed["duration"],
    ) and measured.peak <= claimed["budget"]
    print(json.dumps({"peak": measured.peak, "duration": measured.duration, "right": right}))
    sys.exit(0 if right else 1)
