"""First call and later calls of `memplan.jit` beside `jax.jit`, on a step that fits as it is.

    python -m experiments.overhead.run --out experiments/overhead/results/NAME.json

Both sides run in one process, in turn, on the same arguments; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import memplan
from memplan.files import write_whole
from models.resnet import ResNetConfig
from models.train import resnet_step

FIRST_CALLS, LATER_CALLS = 3, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "first_call": first_calls(),
        "later_calls": later_calls(),
    }
    write_whole(options.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def small_step() -> Any:
    """A real training step, compiled in seconds: ResNet-26 on 64^2 images."""
    return resnet_step(64, 4, config=ResNetConfig(depth=26, filters=16, classes=10), concrete=True)


def first_calls() -> dict[str, float]:
    """Seconds of the first call (trace, compile, run) of either, caches cleared before each."""
    step, args = small_step()
    rounds = [(first_call(jax.jit, step, args), first_call(memplan.jit, step, args)) for _ in range(FIRST_CALLS)]
    pair = tuple(map(statistics.median, zip(*rounds, strict=True)))
    return {"jax_s": pair[0], "memplan_s": pair[1], "ratio": pair[1] / pair[0]}


def first_call(wrap: Callable[..., Any], step: Callable[..., Any], args: Any) -> float:
    jax.clear_caches()
    wrapped = wrap(lambda state, batch: step(state, batch))
    start = time.perf_counter()
    jax.block_until_ready(wrapped(*args))
    return time.perf_counter() - start


def later_calls() -> dict[str, float]:
    """Seconds to dispatch one call once compiled, on a step that does nearly nothing with many arguments."""
    state = {f"w{i}": jax.numpy.ones(4) for i in range(200)}

    def step(state: Any) -> Any:
        return {name: value + 1 for name, value in state.items()}

    ways = {"jax_s": jax.jit(step), "memplan_s": memplan.jit(step)}
    for way in ways.values():
        jax.block_until_ready(way(state))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(LATER_CALLS):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(state))
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(many) for name, many in seconds.items()}
    return {**medians, "ratio": medians["memplan_s"] / medians["jax_s"]}


if __name__ == "__main__":
    main()
