"""Tables of measured results, kept in the README next to the results."""

import argparse
import os
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from memplan.io import versions, write_atomic

END = "<!-- end -->\n"


def inserted(text: str, new: str, name: str = "tables") -> str:
    """Replace everything between the marks `<!-- NAME -->` and the next `<!-- end -->`.

    ValueError: a mark is missing.
    """
    begin = f"<!-- {name} -->\n"
    before, mark, remainder = text.partition(begin)
    _, closed, after = remainder.partition(END)
    if not mark or not closed:
        raise ValueError(
            f"the README lacks {begin.strip()} or {END.strip()}; put the two lines back."
        )
    return f"{before}{begin}\n{new}\n{END}{after}"


def insert(readme: Path, new: str) -> None:
    """The same for a file, which is written atomically, or not at all if a mark is missing."""
    write_atomic(readme, inserted(readme.read_text(), new))


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def conditions(*packages: str) -> dict[str, Any]:
    """The hardware and package versions of a measurement, for its JSON."""
    hardware = f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return {"hardware": hardware, "versions": dict(versions(*packages))}


def command_line(
    description: str | None,
    cases: Collection[str],
    measure: Callable[[str], str],
    readme: Path,
    table: Callable[[], str],
) -> None:
    """The command line of an experiment with one result per case.

    `--only NAME ...` measures some cases, `--table` only rewrites the README. `description` is the
    module's docstring. `measure` returns the JSON of a case, written to `results/` next to the
    README.
    """
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0] if description else None
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=cases)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = readme.parent / "results"
    results.mkdir(exist_ok=True)
    for name in (args.only or cases) if not args.table else ():
        write_atomic(results / f"{name}.json", measure(name) + "\n")
    insert(readme, table())
