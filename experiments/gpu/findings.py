"""Rows as a page: what was measured, what was predicted, and by how much the models of bytes and seconds are off."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.units import format_bytes, format_seconds

Row = Mapping[str, Any]
"""As `experiments.gpu` keeps it: what was asked, `card`, `seconds`, `pairs` with `facts`, and `error` if it failed."""

NOTHING = """# Findings

No real card has been asked yet. `python -m experiments.gpu` on a machine with a GPU writes this page.
"""
_TOY = "**None of this is a GPU's.** The rows were made to try the script; their seconds and rates mean nothing."


def page(rows: Sequence[Row], asked: Sequence[str], toy: bool = False) -> str:
    """Markdown; names the rows that were `asked` for and are missing. ValueError for no real card's, but with `toy`."""
    unreal = [row["name"] for row in rows if not row["card"]["real"]]
    if unreal and not toy:
        raise ValueError(f"these rows are not a real card's: {'; '.join(unreal)}. Findings are; --toy tries the page.")
    return "\n".join(_lines(rows, asked, toy)) + "\n" if rows else NOTHING


def _lines(rows: Sequence[Row], asked: Sequence[str], toy: bool) -> Iterator[str]:
    yield "# Findings"
    if toy:
        yield from ("", _TOY)
    missing = set(asked) - {row["name"] for row in rows}
    if missing:
        yield from ("", f"Not measured: {'; '.join(name for name in asked if name in missing)}.")
    for how in dict.fromkeys(row["card"]["how"] for row in rows):
        here = [row for row in rows if row["card"]["how"] == how]
        yield from ("", f"## {how}", "")
        yield ", ".join(f"{name} {version}" for name, version in here[0]["card"]["versions"].items())
        yield from ("", "What several rows tell, measured over predicted:", "")
        yield from ("| | rows | median | least | most |", "|---|---:|---:|---:|---:|")
        yield from _ratios(here)
        for row in here:
            yield from _row(row)


def _ratios(rows: Sequence[Row]) -> Iterator[str]:
    ratios = defaultdict[str, list[float]](list)
    for row in rows:
        for name, (measured, predicted) in row["pairs"].items():
            ratios[name] += [measured / predicted] if predicted else []
    for name, found in ratios.items():
        if len(found) > 1:
            figures = f"{statistics.median(found):.3f} | {min(found):.3f} | {max(found):.3f}"
            yield f"| {_label(name)} | {len(found)} | {figures} |"


def _row(row: Row) -> Iterator[str]:
    settings = "".join(f", `{name}={value}`" for name, value in row["environment"].items())
    failed = "Failed: " if "error" in row else ""
    yield from ("", f"### {failed}{row['name']}", "", f"{row['card']['how']}; {row['seconds']:.0f} s{settings}", "")
    if row["pairs"]:
        yield from ("| | measured | predicted | ratio |", "|---|---:|---:|---:|")
    for name, (measured, predicted) in row["pairs"].items():
        ratio = f"{measured / predicted:.3f}" if predicted else ""
        yield f"| {_label(name)} | {_figure(name, measured)} | {_figure(name, predicted)} | {ratio} |"
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
