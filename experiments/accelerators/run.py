"""A matrix product, a convolution and one AlexNet step on every backend that is here, with the roofline beside it.

python -m experiments.accelerators.run [--only BACKEND ...]    # measures, writes results/
python -m experiments.accelerators.run --table                 # rewrites the table of README.md
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.readme import measure_and_tell
from memplan.hardware.device import Device
from memplan.outcome.summary import versions
from memplan.studies import calibrate
from memplan.xla.replay import replay
from models.train import alexnet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
RUNS = 7
PLATFORMS = ("cpu", "gpu", "tpu")

Work = tuple[Callable[..., Any], Sequence[Any]]


@dataclass(frozen=True)
class Row:
    """One piece of work on one backend.

    Attributes:
      flops: matrix work, by the compiled program.
      measured_s: median of `RUNS` runs, compilation not counted.
      roofline_s: by the rates that `memplan calibrate` measures here, a kernel at a time.
    """

    work: str
    flops: float
    measured_s: float
    roofline_s: float


def works() -> Iterator[tuple[str, Callable[[], Work]]]:
    """Made when it is their turn, so that memory holds one at a time."""
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        yield f"matrix product 2048^3, {name}", lambda dtype=dtype: _product(2048, dtype)
        yield f"convolution 3x3, 64 channels, 16 x 112^2, {name}", lambda dtype=dtype: _convolution(dtype)
    yield "AlexNet step, batch 32, 224^2, float32", lambda: alexnet_step(batch=32, concrete=True)


def _product(side: int, dtype: Any) -> Work:
    left = jax.random.normal(jax.random.key(0), (side, side), dtype)
    return jnp.matmul, (left, left.T)


def _convolution(dtype: Any) -> Work:
    image = jax.random.normal(jax.random.key(0), (16, 112, 112, 64), dtype)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 64, 64), dtype)

    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return convolve, (image, kernel)


def measured(name: str, work: Work, device: Device) -> Row:
    function, args = work
    run = jax.jit(function).lower(*args).compile()
    moved = replay(run.as_text() or "", device)
    jax.block_until_ready(run(*args))
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
    return Row(name, moved.flops, statistics.median(seconds), moved.compute_s)


def here() -> tuple[str, ...]:
    """Platforms with a device on this machine."""
    found = []
    for name in PLATFORMS:
        try:
            jax.devices(name)
        except RuntimeError:
            continue
        found.append(name)
    return tuple(found)


def measure(backend: str) -> str:
    with jax.default_device(jax.devices(backend)[0]):
        device = calibrate.calibrate().device
        rows = [asdict(measured(name, make(), device)) for name, make in works()]
    kind = jax.devices(backend)[0].device_kind
    content: Mapping[str, Any] = {
        "device": kind, "machine": platform.machine(), "memory_bandwidth": device.memory_bandwidth,
        "flops": dict(device.flops), "rows": rows, "versions": dict(versions()),
    }  # fmt: skip
    return json.dumps(content, indent=1)


def table() -> str:
    names = ("backend", "work", "GFLOP", "measured ms", "GFLOP/s", "roofline ms", "share of the roofline")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for path in sorted(RESULTS.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            seconds, flops = row["measured_s"], row["flops"]
            cells = (
                path.stem,
                row["work"],
                f"{flops / 1e9:.1f}",
                f"{1e3 * seconds:.1f}",
                f"{flops / seconds / 1e9:.0f}",
                f"{1e3 * row['roofline_s']:.1f}",
                f"{row['roofline_s'] / seconds:.0%}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_and_tell(__doc__, here(), measure, README, table)
