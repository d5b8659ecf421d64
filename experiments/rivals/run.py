"""Plans real steps for shares of their plain peak, and compiles what jax and XLA do about memory without a plan.

    python -m experiments.rivals.run [--only NAME ...] [--force]    # one curve per step and device, into results/
    python -m experiments.rivals.run --table                        # rewrites the table of README.md

`NAME` is the beginning of a step's name. Curves are written whole or not at all; those that exist are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import jax.numpy as jnp

from experiments.readme import inserted
from memplan import api
from memplan.io import write_atomic
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from models.train import Built, decoder_step, googlenet_step, resnet_step, unet3d_step
from models.transformer import DecoderConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
SHARES = (0.75, 0.5, 0.35, 0.25)

_F32 = DecoderConfig(layers=8, width=512, heads=8, dtype=jnp.float32)
_BF16 = DecoderConfig(layers=24, dtype=jnp.bfloat16)
STEPS: dict[str, tuple[Callable[[], Built], tuple[str, ...]]] = {
    "unet3d_144": (partial(unet3d_step, 144), ("v100", "h200")),
    "resnet50_b64": (partial(resnet_step, batch=64, depth=50), ("v100", "h200")),
    "resnet152_b32": (partial(resnet_step, batch=32, depth=152), ("v100", "h200")),
    "googlenet_b128": (partial(googlenet_step, batch=128), ("v100", "h200")),
    "decoder_8_f32": (partial(decoder_step, batch=8, tokens=512, config=_F32), ("v100",)),
    "decoder_24_bf16": (partial(decoder_step, batch=8, tokens=1024, config=_BF16), ("h200",)),
}


@dataclass(frozen=True)
class Comparison:
    """One step under one budget: milliseconds of each way that fits, None where none does."""

    name: str
    share: float
    plain_ms: float
    own_ms: float | None
    xla_ms: float | None
    policy_ms: float | None
    policy: str
    least_ms: float

    @property
    def rival_ms(self) -> float | None:
        return min((ms for ms in (self.xla_ms, self.policy_ms) if ms is not None), default=None)


def measure(name: str, device: str) -> Curve:
    step, args = STEPS[name][0]()
    return api.curve(step, args, points=SHARES, device=device, donate_argnums=0)


def comparisons(name: str, curve: Curve) -> Iterator[Comparison]:
    """One for each budget, largest first."""
    assert curve.plain_step_s is not None
    for share in SHARES:
        budget = int(share * curve.plain_bytes)
        planned = {point.way: point for point in curve.points if point.budget_bytes == budget}
        fitting = [p for p in curve.points if p.budget_bytes is None and p.step_s and (p.device_bytes or 0) <= budget]
        policy = min(fitting, key=lambda point: point.step_s or 0.0, default=None)
        yield Comparison(
            name, share, 1e3 * curve.plain_step_s, _ms(planned[MEMPLAN]), _ms(planned[XLA]), _ms(policy),
            policy.way.partition(", ")[2] if policy else "",
            _ms(planned[BOUND]) or 0.0,
        )  # fmt: skip


def _ms(point: Point | None) -> float | None:
    return None if point is None or point.step_s is None else 1e3 * point.step_s


def table(rows: Sequence[Comparison]) -> str:
    """As markdown, with the sums below."""
    names = ("step", "share", "plain ms", "memplan ms", "over plain", "XLA ms", "best policy that fits, ms", "bound ms")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        over = "" if row.own_ms is None else f"{row.own_ms / row.plain_ms - 1:+.1%}"
        policy = _cell(row.policy_ms) + (f" ({row.policy})" if row.policy else "")
        own, xla, least = _cell(row.own_ms), _cell(row.xla_ms), f"{row.least_ms:.1f}"
        cells = (row.name, f"{row.share:.0%}", f"{row.plain_ms:.1f}", own, over, xla, policy, least)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in sums(rows))]) + "\n"


def sums(rows: Sequence[Comparison]) -> Iterator[str]:
    solved = [(row, row.own_ms) for row in rows if row.own_ms is not None]
    against = [row for row in rows if row.xla_ms is not None]
    rivalled = [(row, row.rival_ms) for row in rows if row.rival_ms is not None]
    policies = sum(row.policy_ms is not None for row in rows)
    yield (
        f"{len(solved)} of {len(rows)} cases have a plan of memplan's own that fits; XLA's own fits in {len(against)}, "
        f"a policy in {policies}."
    )
    best = sum((row.own_ms or math.inf) <= rival for row, rival in rivalled)
    yield f"In {best} of the {len(rivalled)} cases where any rival fits, memplan's own plan is at least as fast."
    ahead = sum((row.own_ms or math.inf) < (row.xla_ms or 0.0) for row in against)
    alone = sum(row.xla_ms is None for row, _ in solved)
    yield (
        f"In {ahead} of the {len(against)} cases where XLA's own fits, memplan's own plan is faster; in {alone} more, "
        "XLA's own does not fit."
    )
    halves = [own / row.plain_ms - 1 for row, own in solved if row.share == 0.5]
    if halves:
        yield f"Median overhead at 50 %: {median(halves):.1%} over {len(halves)} steps."
    if solved:
        gap = median(own / row.least_ms - 1 for row, own in solved)
        best_ms = ((row, min(row.own_ms or math.inf, row.rival_ms or math.inf)) for row in rows)
        below = sum(ms < row.least_ms and not math.isclose(ms, row.least_ms) for row, ms in best_ms)
        yield f"Median distance to the bound: {gap:.1%}; programs that are below it: {below}."


def _cell(ms: float | None) -> str:
    return "none fits" if ms is None else f"{ms:.1f}"


def curves() -> Iterator[tuple[str, Path]]:
    return ((f"{name}-{device}", RESULTS / f"{name}-{device}.json") for name in STEPS for device in STEPS[name][1])


def regenerate() -> str:
    """The README with the table of the curves that are there."""
    found = [(name, Curve.from_json(path.read_text())) for name, path in curves() if path.exists()]
    rows = [row for name, curve in found for row in comparisons(name, curve)]
    return inserted(README.read_text(), table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        for name, path in curves():
            if (path.exists() and not args.force) or (args.only and not name.startswith(tuple(args.only))):
                continue
            start = time.perf_counter()
            step, _, device = name.rpartition("-")
            curve = measure(step, device)
            RESULTS.mkdir(exist_ok=True)
            curve.save_json(path)
            told = ", ".join(
                f"{row.share:.0%} {_cell(row.own_ms)}/{_cell(row.xla_ms)}" for row in comparisons(name, curve)
            )
            print(f"{name}: memplan/XLA {told} ({time.perf_counter() - start:.0f} s)", flush=True)
    write_atomic(README, regenerate())


if __name__ == "__main__":
    main()
