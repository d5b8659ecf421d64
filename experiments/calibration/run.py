"""Predicted against measured seconds of training steps on the local CPU, with assumed and with measured rates.

    python -m experiments.calibration.run --out experiments/calibration/results

Writes `device.json` (as `memplan calibrate --out` does) and `steps.json`. The device is measured in the same process
before and after the steps, and of each rate the better counts: on a busy machine neither time alone is a quiet one. A
step runs in two ways: as `jax.jit` compiles it, and cut into segments as for a budget of half its bytes with nothing
recomputed; predictions are the simulator's for one segment and for those segments.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from experiments.budgets.cases import mlp_step
from memplan import pipeline
from memplan.hardware import measured
from memplan.hardware.device import Device
from memplan.hardware.measured import Spec
from memplan.io import write_atomic
from memplan.pipeline import Request
from memplan.studies import calibrate
from memplan.xla.local import local_device
from memplan.xla.replay import replay
from models.resnet import ResNetConfig
from models.train import Built, decoder_step, resnet_step, unet3d_step
from models.transformer import DecoderConfig
from models.unet3d import UNet3DConfig

ROUNDS = 9
UNLIMITED = 2**62  # bytes: the step stays as it is
_KINDS = {"assumed": "assumed rates", "measured": "measured rates", "convolutions": "and convolutions' own"}

STEPS: Mapping[str, Callable[[], Built]] = {
    "MLP, 8 layers of 1024, batch 1024": lambda: mlp_step(8, 1024, 1024, concrete=True),
    "3D U-Net, 32^3, 3 levels": lambda: unet3d_step(32, config=UNet3DConfig(filters=16, levels=3), concrete=True),
    "ResNet-26, 64^2, batch 16": lambda: resnet_step(
        64, 16, config=ResNetConfig(depth=26, filters=32, classes=10), concrete=True
    ),
    "decoder, 4 layers of 256, 4 x 256 tokens": lambda: decoder_step(
        batch=4, tokens=256, config=DecoderConfig(layers=4, width=256, heads=4, vocab=4096), concrete=True
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    before = calibrate.calibrate(lambda stage, share: print(stage, flush=True))
    runs = {name: Case(name, make) for name, make in STEPS.items()}
    seconds = {name: case.run() for name, case in runs.items()}
    after = calibrate.calibrate(lambda stage, share: print(stage, flush=True))
    measured = better(before, after)
    devices = {"assumed": local_device(), "measured": measured.device}
    rows = [row for name, case in runs.items() for row in case.rows(seconds[name], devices)]
    found = {
        "hardware": measured.conditions.hardware,
        "versions": dict(measured.conditions.versions),
        "date": measured.conditions.date,
        "load": [*before.conditions.load, *after.conditions.load],
        "rounds": ROUNDS,
        "drift": drift(before, after),
        "steps": rows,
        "factor": {kind: factor(rows, kind) for kind in devices},
    }
    measured.save(out / "device.json")
    write_atomic(out / "steps.json", json.dumps(found, indent=1) + "\n")
    print(table(found))


class Case:
    """A step, compiled as it is and planned within half of the bytes that this takes."""

    def __init__(self, name: str, make: Callable[[], Built]):
        print(name, flush=True)
        step, self.args = make()
        self.name = name
        plain = pipeline.best(step, self.args, {}, {}, Request(UNLIMITED))
        planned = pipeline.best(step, self.args, {}, {}, Request(plain.device_bytes // 2))
        self.ways = {"plain": plain, "planned": planned}

    def run(self) -> dict[str, list[float]]:
        """Seconds of each run of either way, in turn."""
        seconds: dict[str, list[float]] = {way: [] for way in self.ways}
        for number in range(ROUNDS + 1):
            for way, found in self.ways.items():
                start = time.perf_counter()
                jax.block_until_ready(found.executable.compiled(*self.args))
                if number:  # the first one warms up
                    seconds[way].append(time.perf_counter() - start)
        return seconds

    def rows(self, seconds: Mapping[str, list[float]], devices: Mapping[str, Device]) -> list[dict[str, Any]]:
        """What was measured and predicted, a row for each way."""
        return [
            {
                "step": self.name,
                "way": way,
                "device_bytes": found.device_bytes,
                "best_s": min(seconds[way]),
                "median_s": statistics.median(seconds[way]),
                "predicted_s": {
                    kind: replay(found.planned.result.module, device).step_s for kind, device in devices.items()
                },
            }
            for way, found in self.ways.items()
        ]


def better(one: Spec, other: Spec) -> Spec:
    """Of each measurement the faster one, and the device that follows from them."""
    pairs = zip(one.conditions.measurements, other.conditions.measurements, strict=True)
    best = tuple(min(pair, key=lambda found: found.value if found.unit == "s" else -found.value) for pair in pairs)
    load = (*one.conditions.load, *other.conditions.load)
    return measured.calibrated(local_device(), replace(one.conditions, load=load, measurements=best))


def factor(rows: list[dict[str, Any]], kind: str) -> float:
    """The geometric mean of how many times too short or too long the predictions are; 1 is perfect."""
    return math.exp(statistics.mean(abs(math.log(row["predicted_s"][kind] / row["best_s"])) for row in rows))


def drift(before: Spec, after: Spec) -> dict[str, float]:
    """How many times faster each rate is after the steps than before: what the machine itself changed."""
    pairs = zip(before.conditions.measurements, after.conditions.measurements, strict=True)
    return {one.name: other.value / one.value for one, other in pairs if one.unit != "s"}


def table(found: Mapping[str, Any]) -> str:
    """The rows of `steps.json` for the README."""
    kinds = " | ".join(_KINDS[kind] for kind in found["factor"])
    lines = [f"| step | run | measured: best, median | {kinds} |", "|---" * (3 + len(found["factor"])) + "|"]
    for row in found["steps"]:
        run = _run(row)
        predicted = [f"{1e3 * s:.0f} ({s / row['best_s']:.2f})" for s in row["predicted_s"].values()]
        measured = f"{1e3 * row['best_s']:.0f}, {1e3 * row['median_s']:.0f} ms"
        lines.append(f"| {row['step']} | {run} | {measured} | {' | '.join(predicted)} |")
    factors = " | ".join(f"{value:.2f}" for value in found["factor"].values())
    return "\n".join([*lines, f"| off by a factor of | | | {factors} |"])


def _run(row: Mapping[str, Any]) -> str:
    """How a step ran; of the former results, in how many segments."""
    if "segments" not in row:
        return row["way"]
    return "as one" if row["way"] == "whole" else f"{row['segments']} segments"


if __name__ == "__main__":
    main()
