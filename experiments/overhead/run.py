"""First call and later calls of `memplan.jit` beside `jax.jit`, of a step that fits as it is; and with a plan on disk.

    python -m experiments.overhead.run            # measures, writes results/
    python -m experiments.overhead.run --table    # rewrites the table of README.md

Both sides run in one process, in turn, on the same arguments; ratios are of medians.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import memplan
from experiments.readme import measure_and_tell
from models.resnet import ResNetConfig
from models.train import resnet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
FIRST_CALLS, LATER_CALLS = 3, 300
SHARE = 0.6  # of what the step takes as it is: within it a plan is needed


@dataclass(frozen=True)
class Pair:
    """Seconds of the same call by either."""

    jax_s: float
    memplan_s: float


def measure(backend: str) -> str:
    content = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "first_call": asdict(first_calls()),
        "second_start": asdict(second_starts()),
        "later_calls": asdict(later_calls()),
    }
    return json.dumps(content, indent=1)


def small_step() -> Any:
    """A real step, compiled in seconds, whose activations outweigh its state: ResNet-26 on 32 images of 64^2."""
    return resnet_step(64, 32, config=ResNetConfig(depth=26, filters=16, classes=10), concrete=True)


def first_calls() -> Pair:
    """The first call (trace, compile, run), caches cleared before each."""
    step, args = small_step()
    return in_turn(memplan.jit, step, args)


def second_starts() -> Pair:
    """The first call of a script that starts again: its plan is on disk."""
    step, args = small_step()
    whole = memplan.jit(step).plan(*args).report.baseline_peak_bytes
    assert whole is not None
    planned = functools.partial(memplan.jit, budget=int(SHARE * whole))
    before = os.environ.get("MEMPLAN_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMPLAN_CACHE"] = folder
        try:
            first_call(planned, step, args)
            return in_turn(planned, step, args)
        finally:
            os.environ.pop("MEMPLAN_CACHE")
            if before is not None:
                os.environ["MEMPLAN_CACHE"] = before


def in_turn(wrap: Callable[..., Any], step: Callable[..., Any], args: Any) -> Pair:
    rounds = [(first_call(jax.jit, step, args), first_call(wrap, step, args)) for _ in range(FIRST_CALLS)]
    return Pair(*map(statistics.median, zip(*rounds, strict=True)))


def first_call(wrap: Callable[..., Any], step: Callable[..., Any], args: Any) -> float:
    jax.clear_caches()
    wrapped = wrap(lambda state, batch: step(state, batch))
    start = time.perf_counter()
    jax.block_until_ready(wrapped(*args))
    return time.perf_counter() - start


def later_calls() -> Pair:
    """The dispatch of one call once compiled, of a step that does nearly nothing with many arguments."""
    state = {f"w{i}": jax.numpy.ones(4) for i in range(200)}

    def step(state: Any) -> Any:
        return {name: value + 1 for name, value in state.items()}

    ways = jax.jit(step), memplan.jit(step)
    for way in ways:
        jax.block_until_ready(way(state))
    rounds = [tuple(later_call(way, state) for way in ways) for _ in range(LATER_CALLS)]
    return Pair(*map(statistics.median, zip(*rounds, strict=True)))


def later_call(way: Callable[..., Any], state: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(way(state))
    return time.perf_counter() - start


def table() -> str:
    found = json.loads((RESULTS / "cpu.json").read_text())
    first, second, later = (Pair(**found[name]) for name in ("first_call", "second_start", "later_calls"))
    rows = (
        ("first call, ResNet-26, 32 of 64^2", first, 1, "s"),
        (f"the same within {100 * SHARE:.0f} % of its bytes, the plan on disk", second, 1, "s"),
        ("later calls, 200 arguments", later, 1e6, "us"),
    )
    lines = [
        f"Medians, both sides in turn, on {found['hardware']}, jax {found['versions']['jax']}:",
        "", "| | jax.jit | memplan.jit | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, pair, scale, unit in rows:
        sides = f"{scale * pair.jax_s:.4g} {unit} | {scale * pair.memplan_s:.4g} {unit}"
        lines.append(f"| {name} | {sides} | {pair.memplan_s / pair.jax_s:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_and_tell(__doc__, ["cpu"], measure, README, table)
