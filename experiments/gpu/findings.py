"""Rows as a page: measured and predicted figures, and the error of the memory and time models."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.units import format_bytes, format_seconds

Row = Mapping[str, Any]
"""A record of `experiments.gpu`: the row, `card`, `seconds`, `pairs`, `facts`, perhaps `error`."""

NOTHING = """# Findings

No real card has been asked yet. `python -m experiments.gpu` on a machine with a GPU \
writes this page.
"""
_TOY = (
    "**None of this is a GPU's.** The rows were made to try the script; "
    "their seconds and rates mean nothing."
)


def page(rows: Sequence[Row], requested: Sequence[str], toy: bool = False) -> str:
    """The page as markdown, with the `requested` rows that are missing.

    ValueError: a row is not from a real card, and `toy` is False.
    """
    unreal = [row["name"] for row in rows if not row["card"]["real"]]
    if unreal and not toy:
        raise ValueError(
            f"these rows are not a real card's: {'; '.join(unreal)}. Findings are; --toy tries the "
            "page."
        )
    return "\n".join(_lines(rows, requested, toy)) + "\n" if rows else NOTHING


def _lines(rows: Sequence[Row], requested: Sequence[str], toy: bool) -> Iterator[str]:
    yield "# Findings"
    if toy:
        yield from ("", _TOY)
    missing = set(requested) - {row["name"] for row in rows}
    if missing:
        yield from (
            "",
            f"Not measured: {'; '.join(name for name in requested if name in missing)}.",
        )
    for how in dict.fromkeys(row["card"]["how"] for row in rows):
        card_rows = [row for row in rows if row["card"]["how"] == how]
        yield from ("", f"## {how}", "")
        yield ", ".join(
            f"{name} {version}" for name, version in card_rows[0]["card"]["versions"].items()
        )
        yield from ("", "What several rows tell, measured over predicted:", "")
        yield from ("| | rows | median | least | most |", "|---|---:|---:|---:|---:|")
        yield from _ratios(card_rows)
        for row in card_rows:
            yield from _row(row)


def _ratios(rows: Sequence[Row]) -> Iterator[str]:
    ratios = defaultdict[str, list[float]](list)
    for row in rows:
        for name, (measured, predicted) in row["pairs"].items():
            ratios[name] += [measured / predicted] if predicted else []
    for name, values in ratios.items():
        if len(values) > 1:
            figures = f"{statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f}"
            yield f"| {_label(name)} | {len(values)} | {figures} |"


def _row(row: Row) -> Iterator[str]:
    settings = "".join(f", `{name}={value}`" for name, value in row["environment"].items())
    failed = "Failed: " if "error" in row else ""
    yield from (
        "",
        f"### {failed}{row['name']}",
        "",
        f"{row['card']['how']}; {row['seconds']:.0f} s{settings}",
        "",
    )
    if row["pairs"]:
        yield from ("| | measured | predicted | ratio |", "|---|---:|---:|---:|")
    for name, (measured, predicted) in row["pairs"].items():
        ratio = f"{measured / predicted:.3f}" if predicted else ""
        cells = _label(name), _figure(name, measured), _figure(name, predicted), ratio
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"- {_label(name)}: {_figure(name, value)}" for name, value in row["facts"].items())
    if failed:
        yield from ("", "```", row["error"], "```")


def _label(name: str) -> str:
    words, _, unit = name.rpartition("_")
    return (words if unit in ("s", "bytes", "bytes/s", "FLOP/s") else name).replace("_", " ")


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    match name.rpartition("_")[2]:
        case "s":
            return format_seconds(value)
        case "bytes":
            return format_bytes(int(value))
        case "bytes/s" | "FLOP/s" as unit:
            return f"{value / 1e9:,.1f} G{unit.replace('bytes', 'B')}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
