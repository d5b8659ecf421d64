"""`memplan.largest` against planning every size of a range of 64.

python -m experiments.largest.run [--only MODEL ...]    # plans and compiles (extra gpu-aot), writes results/
python -m experiments.largest.run --table               # rewrites the table of README.md
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import memplan
from experiments.readme import measure_and_tell
from memplan import api
from memplan.errors import InfeasibleBudgetError
from memplan.outcome.summary import versions
from models.train import Built, alexnet_step, decoder_step, googlenet_step, resnet_step, unet2d_step, unet3d_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
COUNT = 64


@dataclass(frozen=True)
class Model:
    """A step that grows by `step` from `low`, and a budget that some of its sizes keep."""

    make: Callable[[int], Built]
    low: int
    step: int
    budget: str

    @property
    def high(self) -> int:
        return self.low + self.step * (COUNT - 1)


_DECODER = partial(decoder_step, 2, 64, tokens=64, vocab=256)
_BLOCK = (8, 8, 8, 8, 8, 8)
_GOOGLENET = partial(googlenet_step, 32, width=1 / 2, classes=5, stages=((), (_BLOCK, _BLOCK)))

MODELS: Mapping[str, Model] = {
    "alexnet-batch": Model(lambda size: alexnet_step(95, size, width=1 / 32, classes=5), 2, 2, "20MiB"),
    "googlenet-batch": Model(lambda size: _GOOGLENET(batch=size), 2, 2, "14MiB"),
    "resnet14-size": Model(lambda size: resnet_step(size, 4, depth=14, filters=8, classes=10), 32, 8, "30MiB"),
    "unet2d-size": Model(lambda size: unet2d_step(size, levels=3, filters=4), 16, 4, "3MiB"),
    "unet3d-size": Model(lambda size: unet3d_step(size, levels=2, filters=4), 8, 2, "60MiB"),
    "decoder-batch": Model(lambda size: _DECODER(batch=size), 1, 1, "32MiB"),
}
LIMITS = {"device": "v100", "host_budget": 0, "planner": "recompute"}


def fits(model: Model, size: int) -> bool:
    step, args = model.make(size)
    planned = memplan.jit(step, budget=model.budget, **LIMITS, donate_argnums=0)
    try:
        planned.plan(*args)
    except InfeasibleBudgetError:
        return False
    return True


def measure(name: str) -> str:
    model = MODELS[name]
    start = time.perf_counter()
    bounds = {"low": model.low, "high": model.high, "step": model.step}
    found = api.frontier(model.make, **bounds, budget=model.budget, **LIMITS)
    between = time.perf_counter()
    fitting = [size for size in range(model.low, model.high + 1, model.step) if fits(model, size)]
    content: dict[str, Any] = {
        "low": model.low, "high": model.high, "step": model.step, "budget": model.budget,
        "largest": found.largest[0][0], "traced": found.traced, "compilations": found.compilations,
        "seconds": between - start, "fitting": fitting, "every_size_s": time.perf_counter() - between,
        "versions": dict(versions()),
    }  # fmt: skip
    return json.dumps(content, indent=1)


def table() -> str:
    names = ("sizes", "budget", "largest", "of every size", "traced", "compiled programs", "s", "s for every size")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name in MODELS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            sizes = f"{name} {found['low']} to {found['high']}"
            best = max(found["fitting"], default="none")
            rest = found["traced"], found["compilations"], f"{found['seconds']:.0f}", f"{found['every_size_s']:.0f}"
            lines.append(f"| {' | '.join(map(str, (sizes, found['budget'], found['largest'], best, *rest)))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_and_tell(__doc__, MODELS, measure, README, table)
