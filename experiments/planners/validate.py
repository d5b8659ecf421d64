"""The judge of an order: peak and duration, straight from the statement of the task. Shares no code with planners.

python -m experiments.planners.validate GRAPH.json ANSWER.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    peak: int  # bytes
    duration: int
    first: tuple[int, ...]  # the order of first computations


def measure(document: Mapping, order: Sequence[int]) -> Measured:
    """Replay node ids; raises ValueError where a node runs before its inputs, or one never runs."""
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
    peak, later = 0, set()  # `later`: outputs that are read after this point before they are made again
    for node in reversed(order):
        there = (later - {node}) | reads[node]
        peak = max(peak, nbytes[node] + sum(nbytes[other] for other in there))
        later = there
    return Measured(peak, sum(duration[node] for node in order), tuple(dict.fromkeys(order)))


if __name__ == "__main__":
    document, claimed = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    found = measure(document, claimed["order"])
    right = (found.peak, found.duration) == (claimed["peak"], claimed["duration"]) and found.peak <= claimed["budget"]
    print(json.dumps({"peak": found.peak, "duration": found.duration, "right": right}))
    sys.exit(0 if right else 1)
