"""Regenerates the tables of README.md from what was measured: `python -m experiments.public.table`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.budgets.rows import Row
from experiments.budgets.table import budgets, environments, missing, same_bits
from experiments.public.run import HERE, NUMBERS, SUITE, told
from experiments.public.steps import STEPS
from experiments.readme import inserted
from memplan.io import write_atomic

README = HERE / "README.md"


def tables(rows: Sequence[Row], numbers: Mapping[str, Any] | None) -> str:
    """Everything that the README shows of the results."""
    measured = (name for name in STEPS if any(row.name.startswith(f"{name}-") for row in rows))
    parts = ["### Within half", budgets(rows, {}), f"Not measured: {missing(STEPS, measured)}."]
    parts += ["### All of them", "\n".join(f"- {line}" for line in told())]
    if numbers:
        parts += ["### Same bits", same_bits(numbers["rows"], list(STEPS))]
    return "\n\n".join([*parts, *environments(rows, numbers)]) + "\n"


def regenerate() -> str:
    """The README with the tables of the committed results."""
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else None
    return inserted(README.read_text(), tables(SUITE.rows(), numbers))


def main() -> None:
    write_atomic(README, regenerate())


if __name__ == "__main__":
    main()
