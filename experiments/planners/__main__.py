"""`python -m experiments.planners GRAPH.json --ratio 0.8 --seconds 60` prints one JSON object."""

import argparse
import json
from pathlib import Path

from experiments.planners.run import plan

parser = argparse.ArgumentParser(prog="python -m experiments.planners", description=__doc__)
parser.add_argument("graph", type=Path, help="node-link JSON")
parser.add_argument(
    "--ratio", type=float, default=0.8, help="budget as a share of the peak without recomputation"
)
parser.add_argument(
    "--seconds", type=float, default=60.0, help="time limit, reading the file included"
)
parser.add_argument(
    "--prove", action=argparse.BooleanOptionalAction, help="by default, of small graphs"
)
parser.add_argument(
    "--runs", type=int, default=1, help="of a proof: orders within a stage, see Answer.runs"
)
chosen = parser.parse_args()
print(json.dumps(plan(chosen.graph, chosen.ratio, chosen.seconds, chosen.prove, chosen.runs)))
