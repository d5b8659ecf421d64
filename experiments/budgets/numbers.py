"""Does a planned step compute what the plain one computes, to the last bit? Every model, at small size, on the CPU.

    python -m experiments.budgets.numbers [--only NAME ...] [--out FILE]

Each is trained for three steps by `jax.jit`, and planned within 70 and within 50 % of the bytes that this takes; where
nothing fits such a share, within that of the smallest plan that was found. What a step returns has to be equal to the
bit: a plan is made of the plain step's own kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from experiments.budgets.rows import environment
from memplan.api import Planned
from memplan.files import write_whole
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import GoogLeNetConfig
from models.resnet import ResNetConfig
from models.train import (
    Built,
    alexnet_step,
    decoder_step,
    deeplab_step,
    googlenet_step,
    nnunet2d_step,
    nnunet3d_step,
    resnet_step,
    unet2d_step,
    unet3d_step,
)
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig

NUMBERS = Path(__file__).parent / "numbers.json"
STEPS = 3
SHARES = (70, 50)

_BLOCK = (8, 8, 8, 8, 8, 8)
_DECODER = partial(DecoderConfig, layers=3, width=32, heads=4, vocab=128, context=64)
MODELS: Mapping[str, Callable[[], Built]] = {
    "alexnet": lambda: alexnet_step(95, 32, AlexNetConfig(width=1 / 16, classes=10), concrete=True),
    "googlenet": lambda: googlenet_step(
        64, 8, GoogLeNetConfig(width=1 / 4, classes=10, stages=((), (_BLOCK, _BLOCK)), aux=False), concrete=True
    ),
    "resnet": lambda: resnet_step(64, 4, config=ResNetConfig(depth=14, filters=8, classes=10), concrete=True),
    "resnet_deep": lambda: resnet_step(32, 4, config=ResNetConfig(depth=26, filters=8, classes=10), concrete=True),
    "deeplab": lambda: deeplab_step(
        65, 2, config=DeepLabConfig(depth=14, filters=8, classes=5, width=16, shallow=8), concrete=True
    ),
    "unet2d": lambda: unet2d_step(64, 2, UNet2DConfig(filters=8), concrete=True),
    "unet3d": lambda: unet3d_step(32, config=UNet3DConfig(filters=8, levels=3), concrete=True),
    "unet3d_bf16": lambda: unet3d_step(32, config=UNet3DConfig(filters=8, levels=3, dtype=jnp.bfloat16), concrete=True),
    "unet3d_transpose": lambda: unet3d_step(
        32, config=UNet3DConfig(filters=8, levels=3, upsampling="transpose"), concrete=True
    ),
    "nnunet2d": lambda: nnunet2d_step(64, 2, filters=8, concrete=True),
    "nnunet3d": lambda: nnunet3d_step(32, 1, filters=8, concrete=True),
    "decoder": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(), concrete=True),
    "decoder_bf16": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(dtype=jnp.bfloat16), concrete=True),
    "decoder_scan": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(scan=True), concrete=True),
}


@dataclass(frozen=True)
class Numbers:
    """A model within a share of its plain bytes.

    Attributes:
      asked, percent: the share that was asked for, and the one that was planned for.
      compiled_bytes: of the planned step, by the compiler.
      again: kernels that are found once more in it.
      outputs: arrays of state and metrics that were compared after every step.
      unequal: those that differ in any bit, of all steps.
    """

    name: str
    asked: int
    percent: int
    plain_bytes: int
    compiled_bytes: int
    again: int
    steps: int
    outputs: int
    unequal: tuple[str, ...]
    seconds: float


def measure(name: str) -> Iterator[Numbers]:
    """Both shares of one model."""
    step, args = MODELS[name]()
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile()
    nbytes = device_bytes(plain)
    expected = trained(plain, args)
    for asked in SHARES:
        started = time.perf_counter()
        percent, planned = fitting(step, args, nbytes, asked)
        found = trained(planned.compile(), args)
        unequal = tuple(
            f"step {number}: {path}"
            for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1)
            for path in theirs
            if theirs[path] != ours[path]
        )
        report, seconds = planned.report, time.perf_counter() - started
        assert report.compiled_peak_bytes is not None
        again = report.recomputations_found or 0
        yield Numbers(
            name, asked, percent, nbytes, report.compiled_peak_bytes, again, STEPS, len(expected[0]), unequal, seconds
        )


def device_bytes(compiled: Any) -> int:
    """By the compiler."""
    stats = compiled.memory_analysis()
    moved = stats.temp_size_in_bytes + stats.argument_size_in_bytes
    return moved + stats.output_size_in_bytes - stats.alias_size_in_bytes


def fitting(step: Callable[..., Any], args: Any, nbytes: int, asked: int) -> tuple[int, Planned]:
    """The share that was asked for, or that of the smallest plan that was found, in whole percents; and the plan."""
    try:
        return asked, memplan.jit(step, budget=nbytes * asked // 100, donate_argnums=0).plan(*args)
    except memplan.InfeasibleBudgetError as error:
        percent = math.ceil(100 * error.smallest_bytes / nbytes)
    return percent, memplan.jit(step, budget=nbytes * percent // 100, donate_argnums=0).plan(*args)


def trained(run: Callable[..., Any], args: Any) -> list[dict[str, bytes]]:
    """The bits of everything that each step returns, by name; the first result is the next step's first argument."""
    state, *rest = jax.tree.map(jnp.copy, args)
    found = []
    for _ in range(STEPS):
        state, metrics = run(state, *rest)
        leaves = jax.tree_util.tree_leaves_with_path((state, metrics))
        found.append({jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=NUMBERS)
    args = parser.parse_args()
    os.environ["MEMPLAN_CACHE"] = "off"
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for name in args.only:
        rows = [asdict(row) for row in measure(name)]
        known = [row for row in known if row["name"] != name] + rows
        write_whole(args.out, json.dumps({"environment": environment(), "rows": known}, indent=1) + "\n")
        for row in rows:
            verdict = f"{len(row['unequal'])} UNEQUAL, such as {row['unequal'][0]}" if row["unequal"] else "equal"
            print(
                f"{name}: {row['outputs']} outputs of {STEPS} steps {verdict} at {row['percent']} % (asked "
                f"{row['asked']}), {row['again']} kernels again; {row['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
