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
from memplan import calibrating
from memplan.files import write_whole
from memplan.planning import spec
from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op
from memplan.planning.simulate import Simulator
from memplan.planning.spec import Spec
from memplan.program.executor import as_array, compile_stages
from memplan.program.extract import extract
from memplan.xla.local import local_device
from memplan.program.trace import trace
from memplan.running import segmented_plan
from models.resnet import ResNetConfig
from models.train import Built, decoder_step, resnet_step, unet3d_step
from models.transformer import DecoderConfig
from models.unet3d import UNet3DConfig

ROUNDS = 9
UNFENCED = 2**62  # bytes; of such a budget no kernel is worth a fence
RANKS = (2, 3)  # of convolutions that are measured

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
    before = calibrating.calibrate(lambda stage, share: print(stage, flush=True))
    runs = {name: Case(name, make) for name, make in STEPS.items()}
    seconds = {name: case.run() for name, case in runs.items()}
    after = calibrating.calibrate(lambda stage, share: print(stage, flush=True))
    measured = better(before, after)
    devices = {"assumed": local_device(), "measured": measured.device, "convolutions": with_convolutions(measured)}
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
    write_whole(out / "steps.json", json.dumps(found, indent=1) + "\n")
    print(table(found))


class Case:
    """A step, compiled in two ways: `whole` and in `segments`."""

    def __init__(self, name: str, make: Callable[[], Built]):
        print(name, flush=True)
        step, self.args = make()
        self.name = name
        program = trace(step, self.args, {}, {})
        self.graph = extract(program)
        self.plain = jax.jit(step).lower(*self.args).compile()
        stats = self.plain.memory_analysis()
        assert stats is not None
        half = (stats.temp_size_in_bytes + stats.argument_size_in_bytes + stats.output_size_in_bytes) // 2
        budgets = {"whole": UNFENCED, "segments": half}
        self.plans = {way: segmented_plan(self.graph, budget, "cpu") for way, budget in budgets.items()}
        self.stages = compile_stages(program, self.graph, self.plans["segments"])
        avals = [var.aval for var in program.jaxpr.jaxpr.invars]
        self.leaves = [as_array(leaf, aval) for leaf, aval in zip(jax.tree.leaves(self.args), avals, strict=True)]

    def run(self) -> dict[str, list[float]]:
        """Seconds of each run of either way, in turn."""
        ways = {"whole": lambda: self.plain(*self.args), "segments": lambda: self.stages(self.leaves)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way, run in ways.items():
                start = time.perf_counter()
                jax.block_until_ready(run())
                if number:  # the first one warms up
                    seconds[way].append(time.perf_counter() - start)
        return seconds

    def rows(self, seconds: Mapping[str, list[float]], devices: Mapping[str, Device]) -> list[dict[str, Any]]:
        """What was measured and predicted, a row for each way."""
        graphs = dict.fromkeys(devices, self.graph) | {"convolutions": named_convolutions(self.graph)}
        return [
            {
                "step": self.name,
                "way": way,
                "segments": len(list(plan.segments())),
                "best_s": min(seconds[way]),
                "median_s": statistics.median(seconds[way]),
                "predicted_s": {
                    kind: Simulator(graphs[kind], device).run(plan).step_s for kind, device in devices.items()
                },
            }
            for way, plan in self.plans.items()
        ]


def named_convolutions(graph: Graph) -> Graph:
    """The graph with `2D float32` in the place of `float32` for convolutions."""

    def classed(op: Op) -> Op:
        rank = len(graph.values[op.outputs[0]].shape) - 2
        return replace(op, flops_dtype=f"{rank}D {op.flops_dtype}") if op.name == "conv_general_dilated" else op

    return replace(graph, ops=tuple(map(classed, graph.ops)))


def with_convolutions(measured: Spec) -> Device:
    """The measured device with rates for convolutions: two forward runs (the input's gradient is another) and one of
    the filter's gradient, as a training step has them."""
    rates = {f"{rank}D float32": convolution_rate(measured, rank) for rank in RANKS}
    return replace(measured.device, flops={**measured.device.flops, **rates})


def convolution_rate(measured: Spec, rank: int) -> float:
    name = f"convolution {rank}D float32"
    forward, gradient = (measured.conditions.measured(f"{name}{of}") for of in ("", ", gradient of the filter"))
    assert forward is not None and gradient is not None
    return 3 / (2 / forward.value + 1 / gradient.value)


def better(one: Spec, other: Spec) -> Spec:
    """Of each measurement the faster one, and the device that follows from them."""
    pairs = zip(one.conditions.measurements, other.conditions.measurements, strict=True)
    best = tuple(min(pair, key=lambda found: found.value if found.unit == "s" else -found.value) for pair in pairs)
    load = (*one.conditions.load, *other.conditions.load)
    return spec.calibrated(local_device(), replace(one.conditions, load=load, measurements=best))


def factor(rows: list[dict[str, Any]], kind: str) -> float:
    """The geometric mean of how many times too short or too long the predictions are; 1 is perfect."""
    return math.exp(statistics.mean(abs(math.log(row["predicted_s"][kind] / row["best_s"])) for row in rows))


def drift(before: Spec, after: Spec) -> dict[str, float]:
    """How many times faster each rate is after the steps than before: what the machine itself changed."""
    pairs = zip(before.conditions.measurements, after.conditions.measurements, strict=True)
    return {one.name: other.value / one.value for one, other in pairs if one.unit != "s"}


def table(found: Mapping[str, Any]) -> str:
    """The rows of `steps.json` for the README."""
    lines = [
        "| step | run | measured: best, median | assumed rates | measured rates | and convolutions' own |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["steps"]:
        run = "as one" if row["way"] == "whole" else f"{row['segments']} segments"
        predicted = [f"{1e3 * s:.0f} ({s / row['best_s']:.2f})" for s in row["predicted_s"].values()]
        measured = f"{1e3 * row['best_s']:.0f}, {1e3 * row['median_s']:.0f} ms"
        lines.append(f"| {row['step']} | {run} | {measured} | {' | '.join(predicted)} |")
    factors = " | ".join(f"{value:.2f}" for value in found["factor"].values())
    return "\n".join([*lines, f"| off by a factor of | | | {factors} |"])


if __name__ == "__main__":
    main()
