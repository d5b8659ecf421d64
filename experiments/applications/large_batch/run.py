"""Accuracy after the same epochs with 1, 4 and 16 times the base batch, in the same memory.

python -m experiments.applications.large_batch.run
python -m experiments.applications.large_batch.run --table  # only the table

Writes results/cpu.json and the table of README.md.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.applications.large_batch.training import RULES, Settings, train
from experiments.readme import conditions, grid, insert
from memplan.io import write_atomic

RESULTS, README = (Path(__file__).parent / name for name in ("results/cpu.json", "README.md"))
SCALES = (1, 4, 16)
SEEDS = (0, 1)
# No rule scales anything at the base batch, so each optimizer is trained once.
CASES = [
    (rule, scale)
    for scale in SCALES
    for rule in (RULES if scale > 1 else ("unscaled", "LARS, linear"))
]


def measure(cases: Iterable[tuple[str, int]], path: Path, settings: Settings) -> None:
    """Train every case; the file is rewritten after each."""
    head, rows = {**conditions("jax", "flax", "optax", "numpy"), "settings": asdict(settings)}, []
    for rule, scale in cases:
        rows += train(rule, scale * settings.base_batch, SEEDS, settings)
        write_atomic(path, json.dumps({**head, "rows": rows}, indent=1) + "\n")


def stored_rows() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["rows"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy in per cent: mean, lowest and highest over seeds; bytes of the largest step."""
    head = ("batch", "updates", "plain MiB", "device MiB", *(f"{rule}, %" for rule in RULES))
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        of_batch = [row for row in rows if row["batch"] == batch]
        nbytes = (
            f"{max(row[name] for row in of_batch) / 2**20:.1f}"
            for name in ("plain_bytes", "device_bytes")
        )
        cells = []
        for rule in RULES:
            shares = [100 * row["accuracy"] for row in of_batch if row["way"] == rule]
            cells.append(
                f"{statistics.mean(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})"
                if shares
                else ""
            )
        lines.append((batch, of_batch[0]["steps"], *nbytes, *cells))
    return grid(head, lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        measure(CASES, RESULTS, Settings())
    insert(README, table(stored_rows()))


if __name__ == "__main__":
    main()
