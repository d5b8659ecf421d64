"""`python -m experiments.planners GRAPH.json --ratio 0.8 --seconds 60`: one JSON object on standard output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from experiments.planners.run import plan


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.planners", description=__doc__)
    parser.add_argument("graph", type=Path, help="node-link JSON")
    parser.add_argument("--ratio", type=float, default=0.8, help="budget as a share of the peak without recomputation")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit, reading the file included")
    parser.add_argument("--planner", choices=("auto", "exact", "scaled"), default="auto")
    parser.add_argument("--runs", type=int, default=1, help="exact: orders within a stage, see Answer.runs")
    chosen = parser.parse_args()
    print(json.dumps(plan(chosen.graph, chosen.ratio, chosen.seconds, chosen.planner, chosen.runs)))


if __name__ == "__main__":
    main()
