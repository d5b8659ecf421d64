"""One measurement in one process: `python -m experiments.gpu.measure CASE WAY SHARE` prints a JSON object."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from memplan.program import compat
from memplan.verify.numbers import relative_error
from memplan.xla.local import room
from models.resnet import ResNetConfig
from models.train import decoder_step, resnet_step, unet3d_step
from models.transformer import DecoderConfig
from models.unet3d import UNet3DConfig

CASES: dict[str, Callable[[], Any]] = {
    "resnet50-b64": lambda: resnet_step(concrete=True),
    "unet3d-96": lambda: unet3d_step(96, concrete=True),
    "decoder-8": lambda: decoder_step(config=DecoderConfig(layers=8, dtype=jax.numpy.bfloat16), concrete=True),
    "decoder-8-scan": lambda: decoder_step(config=DecoderConfig(layers=8, scan=True), concrete=True),
}
TOYS: dict[str, Callable[[], Any]] = {
    "resnet-toy": lambda: resnet_step(64, 4, config=ResNetConfig(depth=14, filters=8, classes=8), concrete=True),
    "unet3d-toy": lambda: unet3d_step(32, config=UNet3DConfig(levels=3, filters=8), concrete=True),
    "decoder-toy-scan": lambda: decoder_step(
        batch=2, tokens=32, config=DecoderConfig(vocab=512, layers=4, width=256, heads=4, scan=True), concrete=True
    ),
}
STEPS = 10


def main(case: str, way: str, share: str, plain_bytes: str) -> None:
    step, (state, batch) = {**CASES, **TOYS}[case]()
    start = time.perf_counter()
    run, facts, place = build(way, step, (state, batch), int(float(share) * int(plain_bytes)))
    facts["compile_s"] = time.perf_counter() - start
    state = place(state)
    batch = jax.device_put(batch)
    state, metrics = jax.block_until_ready(run(state, batch))
    facts["first_loss"] = float(metrics["loss"])
    facts["checksum"] = [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(state)]
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(run(state, batch))
        seconds.append(time.perf_counter() - start)
    facts["step_s"] = sorted(seconds)
    facts["peak_bytes_in_use"] = now.peak_bytes if (now := room()) else None
    facts["copies"] = copies_under_computation(run, state, batch)
    print(json.dumps(facts))


def build(way: str, step: Any, args: Any, budget: int) -> tuple[Callable[..., Any], dict[str, Any], Callable[..., Any]]:
    """The step as jax runs it, under `jax.checkpoint`, planned, or with its state `held`; and what places the state."""
    if way in ("memplan", "held"):
        planned = memplan.jit(step, budget=budget, donate_argnums=0, host_state=0 if way == "held" else ()).plan(*args)
        report = planned.report
        facts = {
            "budget_bytes": budget, "planner": report.planner, "compiled_bytes": report.compiled_peak_bytes,
            "predicted_bytes": report.predicted_peak_bytes, "host_bytes": report.host_peak_bytes,
            "predicted_step_s": report.predicted_step_s, "copies_found": report.copies_found,
            "recomputations_found": report.recomputations_found,
        }  # fmt: skip
        return planned.compile(), facts, planned.place
    if way == "checkpoint":
        with compat.checkpointed_gradients(jax.checkpoint_policies.dots_saveable):
            compiled = jax.jit(lambda state, batch: step(state, batch), donate_argnums=0).lower(*args).compile()
    else:
        compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    total = stats.temp_size_in_bytes + stats.argument_size_in_bytes + stats.output_size_in_bytes
    return compiled, {"compiled_bytes": total - stats.alias_size_in_bytes}, lambda state: state


def copies_under_computation(run: Callable[..., Any], state: Any, batch: Any) -> dict[str, float] | None:
    """Seconds of host copies in one step, and how many of them lie under kernels; None where the trace has no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            jax.block_until_ready(run(state, batch))
        traces = sorted(Path(folder).rglob("*.trace.json.gz"))
        if not traces:
            return None
        events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    gpus = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"]["name"]}
    spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e["pid"] in gpus]
    copies = [(start, end) for name, start, end in spans if "MemcpyD2H" in name or "MemcpyH2D" in name]
    kernels = [(start, end) for name, start, end in spans if "Memcpy" not in name and "Memset" not in name]
    if not spans:
        return None
    return {"copy_s": _length(copies) / 1e6, "hidden_s": overlap(copies, kernels) / 1e6}


def overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length of the part of `some` that `others` cover; inclusion and exclusion over the unions."""
    return _length(some) + _length(others) - _length(some + others)


def _length(spans: list[tuple[float, float]]) -> float:
    """Length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def checksum_error(one: list[float], other: list[float]) -> float:
    """Largest relative difference between the sums of magnitudes of two states' leaves."""
    return max(relative_error(np.array([a]), np.array([b])) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
