"""Regenerates the tables of README.md from what was measured.

    python -m experiments.budgets.table

Everything between `<!-- tables -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.budgets.cases import CASES
from experiments.budgets.drawn import DRAWN
from experiments.budgets.numbers import MODELS, NUMBERS
from experiments.budgets.rows import Row, former
from experiments.budgets.run import BEFORE, HERE, SUITE, told
from experiments.readme import inserted
from memplan.io import write_atomic

README = HERE / "README.md"
MIB = 2**20


def tables(
    rows: Sequence[Row],
    before: Mapping[str, Row],
    numbers: Mapping[str, Any] | None,
    drawn: Mapping[str, Any] | None,
) -> str:
    """Everything that the README shows of the results."""
    required = {name for name, case in CASES.items() if case.required}
    parts = [
        "### The required cases", budgets([row for row in rows if row.name in required], before),
        "### The others", budgets([row for row in rows if row.name not in required], before),
        f"Not measured: {missing(CASES, (row.name for row in rows))}.",
        "### All of them", "\n".join(f"- {line}" for line in told()),
    ]  # fmt: skip
    if numbers:
        parts += ["### Same bits", same_bits(numbers["rows"], list(MODELS))]
    if drawn:
        parts.append(of_drawn(drawn))
    return "\n\n".join([*parts, *environments(rows, numbers)]) + "\n"


def budgets(rows: Iterable[Row], before: Mapping[str, Row]) -> str:
    """What was asked for and what came out: MiB, milliseconds by the replay, seconds by the clock.

    Args:
      before: rows of the former version, by name; without any there are no columns for them.
    """
    head = (
        "case", "plain", "budget", "status", "predicted", "compiled", "host", "plain ms", "ms", "over plain",
        *(("before ms", "before MiB") if before else ()),
        "compilations", "planning s", "ready s", "plain compile s", "cost",
    )  # fmt: skip
    return grid(head, (_budget(row, _former(before.get(row.name)) if before else []) for row in rows))


def _budget(row: Row, before: Sequence[str]) -> list[str]:
    status = row.status if row.status != "does not fit" else f"{row.status}: floor {mib(row.floor_bytes)}"
    return [
        row.name, mib(row.plain_bytes), mib(row.budget_bytes), status, mib(row.predicted_bytes),
        mib(row.compiled_bytes), mib(row.host_bytes), ms(row.plain_step_s), ms(row.step_s),
        "" if row.slower is None else f"{row.slower:+.1%}",
        *before,
        "" if row.compilations is None else str(row.compilations), seconds(row.planning_s), seconds(row.ready_s),
        seconds(row.plain_compile_s), "" if row.cost is None else f"{row.cost:.1f}",
    ]  # fmt: skip


def _former(row: Row | None) -> list[str]:
    return [ms(row.step_s if row else None), mib(row.compiled_bytes if row else None)]


def missing(wanted: Iterable[str], found: Iterable[str]) -> str:
    """Names without a result."""
    there = set(found)
    return ", ".join(name for name in wanted if name not in there) or "none"


def same_bits(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Per step and share: what was compared, and whether every bit agreed; in the order of `names`."""
    rows = sorted(rows, key=lambda row: (names.index(row["name"]), -row["asked"]))
    head = ("step", "share", "KiB of plain's", "kernels again", "arrays a step", "steps", "bits")
    return f"{grid(head, map(_same_bits, rows))}\n\nNot compared: {missing(names, (row['name'] for row in rows))}."


def of_drawn(drawn: Mapping[str, Any]) -> str:
    """What the bits of steps were that nobody wrote."""
    return (
        f"{drawn['steps']} steps drawn at random: {drawn['plans']} plans, {drawn['with_kernels_again']} of them with "
        f"kernels that run again, {drawn['kernels_again']} in all; of {drawn['arrays']} arrays "
        f"{sum(map(len, drawn['unequal'].values()))} differ."
    )


def _same_bits(row: Mapping[str, Any]) -> list[str]:
    memory = f"{row['compiled_bytes'] // 1024} of {row['plain_bytes'] // 1024}"
    verdict = f"{len(row['unequal'])} arrays differ" if row["unequal"] else "equal"
    verdict = "by the gate" if row["gated"] else verdict
    share = f"{row['percent']} %" + (f" (for {row['asked']})" if row["percent"] != row["asked"] else "")
    return [row["name"], share, memory, str(row["again"]), str(row["outputs"]), str(row["steps"]), verdict]


def environments(rows: Iterable[Row], numbers: Mapping[str, Any] | None) -> list[str]:
    """What the results were measured with, one paragraph for each version of memplan, and one for the numbers."""
    versions = {row.version: row.environment for row in rows}
    found = [f"Measured by memplan {version.partition(' ')[0]} with {_told(of)}." for version, of in versions.items()]
    return [*found, *([f"Bits compared with {_told(numbers['environment'])}."] if numbers else [])]


def _told(environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment.items())


def mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.0f}"


def ms(found: float | None) -> str:
    return "" if found is None else f"{found * 1e3:.1f}"


def seconds(found: float | None) -> str:
    return "" if found is None else f"{found:.1f}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def regenerate() -> str:
    """The README with the tables of the committed results."""
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else None
    drawn = json.loads(DRAWN.read_text()) if DRAWN.exists() else None
    return inserted(README.read_text(), tables(SUITE.rows(), former(BEFORE), numbers, drawn))


def main() -> None:
    write_atomic(README, regenerate())


if __name__ == "__main__":
    main()
