"""Predicted against measured seconds on the device that is here, with the rates assumed of it and with measured ones.

The device is measured before and after the work, and of each rate the better counts: on a busy machine neither time
alone is a quiet one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping

import jax

from experiments.bench.cases import Case
from experiments.bench.measures.planned import UNLIMITED
from experiments.bench.results import Found
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.pipeline import Request
from memplan.studies import calibrate
from memplan.xla.local import local_device
from memplan.xla.replay import replay

ROUNDS = 9


def measure(case: Case) -> Found:
    """A row for the work as it is and, where the case has a budget, one planned within it."""
    before = calibrate.measure()
    ways = _ways(case)
    seconds = _run(ways, case)
    after = calibrate.measure()
    here = calibrate.with_rates(local_device(), better(before, after), jax.default_backend())
    devices = {"assumed_s": local_device(), "measured_s": here}
    return Found([
        {
            "way": way,
            "flops": replay(found.planned.result.module, devices["measured_s"]).flops,
            "compiled_bytes": found.device_bytes,
            "best_s": min(seconds[way]),
            "median_s": statistics.median(seconds[way]),
            **{name: replay(found.planned.result.module, device).step_s for name, device in devices.items()},
            "drift": drift(before, after),
            "load": os.getloadavg()[0],
        }
        for way, found in ways.items()
    ])  # fmt: skip


def _ways(case: Case) -> dict[str, Outcome]:
    step, args, _ = case.built()
    plain = pipeline.best(step, args, {}, {}, Request(UNLIMITED))
    if not isinstance(case.budget, int):
        return {"plain": plain}
    limit = plain.device_bytes * case.budget // 100
    return {"plain": plain, "planned": pipeline.best(step, args, {}, {}, Request(limit))}


def _run(ways: dict[str, Outcome], case: Case) -> dict[str, list[float]]:
    """Seconds of each run of either way, in turn."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    _, args, _ = case.built()
    for number in range(ROUNDS + 1):
        for way, found in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(found.executable.compiled(*args))
            if number:  # the first one warms up
                seconds[way].append(time.perf_counter() - start)
    return seconds


def better(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Of each rate the faster one."""
    return {name: (min if name == calibrate.LATENCY else max)(value, other[name]) for name, value in one.items()}


def drift(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """By how much the rate that changed most did: what the machine itself changed."""
    return max(abs(after[name] / value - 1) for name, value in before.items() if name != calibrate.LATENCY)
