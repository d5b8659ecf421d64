"""Tables of measured results, kept in the README beside them."""

import argparse
import os
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from memplan.io import versions, write_atomic

END = "<!-- end -->\n"


def inserted(text: str, new: str, name: str = "tables") -> str:
    """`text` with all from the mark `<!-- NAME -->` to the next `<!-- end -->` replaced; ValueError without them."""
    begin = f"<!-- {name} -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the README lacks {begin.strip()} or {END.strip()}; put the two lines back.")
    return f"{before}{begin}\n{new}\n{END}{after}"


def insert(readme: Path, new: str) -> None:
    """The same in a file, which is written whole; where it lacks a mark, not at all."""
    write_atomic(readme, inserted(readme.read_text(), new))


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def conditions(*packages: str) -> dict[str, Any]:
    """What a result was measured on, as JSON has it."""
    hardware = f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return {"hardware": hardware, "versions": dict(versions(*packages))}


def measure_and_tell(
    told: str | None, cases: Collection[str], measure: Callable[[str], str], readme: Path, table: Callable[[], str]
) -> None:
    """The command line of an experiment with a result per case: `--only NAME ...`, or `--table` for the README alone.

    `told` is the module's docstring; `measure` makes JSON of a case, written whole to `results/` beside the README.
    """
    parser = argparse.ArgumentParser(description=told.splitlines()[0] if told else None)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=cases)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = readme.parent / "results"
    results.mkdir(exist_ok=True)
    for name in (args.only or cases) if not args.table else ():
        write_atomic(results / f"{name}.json", measure(name) + "\n")
    insert(readme, table())
