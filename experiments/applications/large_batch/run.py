"""Accuracy of one model after the same epochs, with global batches from the base batch to 32 times as many examples.

python -m experiments.applications.large_batch.run  # every point on one device, writes results/cpu.json
python -m experiments.applications.large_batch.run --devices 4  # one point by 4 devices, too; devices.json
python -m experiments.applications.large_batch.run --rates  # base rates at the base batch, writes results/rates.json
python -m experiments.applications.large_batch.run --table  # rewrites the tables of README.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from experiments.applications.large_batch.training import (
    TEST_SEED,
    VALIDATION_SEED,
    WAYS,
    Outcome,
    Point,
    Settings,
    Trainer,
)
from experiments.readme import grid, inserted
from memplan import io
from memplan.io import write_atomic

HERE = Path(__file__).parent
README = HERE / "README.md"
RESULTS, RATES, DEVICES = (HERE / "results" / name for name in ("cpu.json", "rates.json", "devices.json"))
SCALES = (1, 4, 16, 32)
SEEDS = (0, 1)
BASE_RATES = {"SGD": 0.025, "LARS": 2.0}  # as `chosen` finds them in results/rates.json
OPTIMIZERS = {"unscaled": "SGD", "linear": "SGD", "LARS, linear": "LARS", "LARS, root": "LARS"}
AT_BASE = {"SGD": "unscaled", "LARS": "LARS, linear"}
"""Which way stands for an optimizer at the base batch, where no way scales anything."""
TRIED = {"SGD": (0.0125, 0.025, 0.05, 0.1, 0.2), "LARS": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
CHECKED = "linear", 4, 0  # way, scale and seed of the point that is also computed by several devices
FIRST = 8  # steps whose losses are compared there: later ones magnify every rounding
GIVEN_UP = 0.01
"""Accuracy at the base batch that is given up for a smaller base rate, which leaves more room to scale."""


@dataclass(frozen=True)
class Row:
    """A point and what became of it."""

    point: Point
    outcome: Outcome


@dataclass(frozen=True)
class Check:
    """The checked point by so many devices.

    Attributes:
      turned: with the examples of every batch in the opposite order, for what roundings alone do.
      first_losses: of the first steps, in nats.
    """

    point: Point
    turned: bool
    accuracy: float
    first_losses: tuple[float, ...]


def points() -> list[Point]:
    """Every way at every scale; at the base batch every optimizer once."""
    return [
        Point(way, scale * Settings().base_batch, BASE_RATES[OPTIMIZERS[way]], seed)
        for scale in SCALES
        for way in (WAYS if scale > 1 else AT_BASE.values())
        for seed in SEEDS
    ]


def measure(these: Iterable[Point], path: Path, settings: Settings, held_out_seed: int) -> None:
    """Trains every point; the file is written whole after each."""
    trainer, rows = Trainer(settings, held_out_seed), []
    for point in these:
        rows.append(Row(point, trainer.train(point)))
        print(rows[-1], flush=True)
        write_atomic(path, document(rows, settings))


def check(devices: int, path: Path, settings: Settings) -> None:
    """Trains the checked point by one device, by one device with its batches turned, and by `devices`."""
    jax.config.update("jax_num_cpu_devices", devices)
    way, scale, seed = CHECKED
    one = Point(way, scale * settings.base_batch, BASE_RATES[OPTIMIZERS[way]], seed)
    trainer, checks = Trainer(settings, TEST_SEED), []
    for point, turned in ((one, False), (one, True), (replace(one, devices=devices), False)):
        state, losses, _ = trainer.descend(point, turned)
        checks.append(Check(point, turned, trainer.accuracy(state), tuple(map(float, losses[:FIRST]))))
        print(checks[-1], flush=True)
    write_atomic(path, document(checks, settings))


def document(rows: Iterable[Row | Check], settings: Settings) -> str:
    versions = dict(io.versions("jax", "flax", "optax", "numpy"))
    found = {
        "hardware": f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "versions": versions,
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(found, indent=1) + "\n"


def known(path: Path) -> list[Row]:
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return [Row(Point(**row["point"]), Outcome(**row["outcome"])) for row in found]


def known_checks(path: Path) -> list[Check]:
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return [Check(Point(**row.pop("point")), first_losses=tuple(row.pop("first_losses")), **row) for row in found]


def chosen(rows: Sequence[Row], way: str) -> float:
    """The smallest base rate tried whose accuracy is at most `GIVEN_UP` below the best one's."""
    accuracies = {row.point.base_rate: row.outcome.accuracy for row in rows if row.point.way == way}
    return min(rate for rate, accuracy in accuracies.items() if accuracy >= max(accuracies.values()) - GIVEN_UP)


def tables(rows: Sequence[Row], checks: Sequence[Check], tried: Sequence[Row]) -> str:
    return "\n".join((by_batch(rows), by_devices(checks), by_rate(tried)))


def by_batch(rows: Sequence[Row]) -> str:
    """Test accuracy in per cent: the mean over seeds, and the lowest and highest."""
    head, lines = ("batch", "updates", *(f"{way}, %" for way in WAYS)), []
    for batch in sorted({row.point.global_batch for row in rows}):
        at_batch = [row for row in rows if row.point.global_batch == batch]
        cells = [_spread([row.outcome.accuracy for row in at_batch if row.point.way == way]) for way in WAYS]
        lines.append((batch, at_batch[0].outcome.steps, *cells))
    return grid(head, lines) + "\n"


def by_devices(checks: Sequence[Check]) -> str:
    """What several devices computed, beside one device, and one device with other roundings."""
    head, lines = ("way", "batch", "devices", "order in a batch", "first losses off by, nats", "accuracy, %"), []
    for found in checks:
        off = max(abs(a - b) for a, b in zip(found.first_losses, checks[0].first_losses, strict=True))
        point, order = found.point, "turned" if found.turned else ""
        cells = point.way, point.global_batch, point.devices, order, f"{off:.0e}", f"{100 * found.accuracy:.1f}"
        lines.append(cells)
    return grid(head, lines) + "\n"


def by_rate(tried: Sequence[Row]) -> str:
    head, lines = ("optimizer", "base rate", "accuracy, %", "chosen"), []
    for row in tried:
        point = row.point
        mark = "yes" if point.base_rate == chosen(tried, point.way) else ""
        lines.append((OPTIMIZERS[point.way], f"{point.base_rate:g}", f"{100 * row.outcome.accuracy:.1f}", mark))
    return grid(head, lines) + "\n"


def _spread(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return ""
    mean, low, high = (100 * value for value in (statistics.mean(accuracies), min(accuracies), max(accuracies)))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def regenerate() -> str:
    """The README with the tables of the results that are there."""
    return inserted(README.read_text(), tables(known(RESULTS), known_checks(DEVICES), known(RATES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=1, metavar="N")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    settings = Settings()
    if args.rates:
        at_base = [Point(AT_BASE[name], settings.base_batch, rate) for name, rates in TRIED.items() for rate in rates]
        measure(at_base, RATES, settings, VALIDATION_SEED)
    elif args.devices > 1:
        check(args.devices, DEVICES, settings)
    elif not args.table:
        measure(points(), RESULTS, settings, TEST_SEED)
    write_atomic(README, regenerate())


if __name__ == "__main__":
    main()
