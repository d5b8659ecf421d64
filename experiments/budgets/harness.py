"""Measures cases one after the other, each in a process of its own, and keeps a row of each: for whoever has steps."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.budgets.rows import ROOT, SOURCES, Row, Rows, environment, version_here

_SHOWN = 2000  # characters of what a process that failed wrote last


@dataclass(frozen=True)
class Suite:
    """Cases, and where their rows are kept.

    Attributes:
      module: as a program with a case's name it prints the row as JSON.
      devices: of the cases, by name.
      results: their rows.
      sources: see `rows.version_here`.
      after: for a case, the one with a smaller budget that has to be found not to fit before.
    """

    module: str
    devices: Mapping[str, str]
    results: Rows
    sources: tuple[str, ...] = SOURCES
    after: Mapping[str, str] = field(default_factory=dict)

    def measure(self, options: argparse.Namespace, arguments: Sequence[str] = ()) -> None:
        """What `parser` says; `arguments` are the module's beside the name of a case."""
        for name in self.missing(self.selected(options.only), options.force, options.keep):
            row = self.measured(name, options.minutes, arguments)
            self.results.keep(row)
            print(line(row), flush=True)

    def measured(self, name: str, minutes: float, arguments: Sequence[str] = ()) -> Row:
        """The row of a case; where its process fails or takes too long, why."""
        command = [sys.executable, "-m", self.module, name, *arguments]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60 * minutes, check=False, env=settings, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            return self._failed(name, f"was not ready after {minutes:g} minutes")
        if done.returncode:
            return self._failed(name, f"ended with code {done.returncode}: {done.stderr[-_SHOWN:]}")  # a finding, too
        return Row(**json.loads(done.stdout.splitlines()[-1]))

    def _failed(self, name: str, reason: str) -> Row:
        return Row(
            name, self.devices[name], version_here(self.sources), "failed", reason=reason, environment=environment()
        )

    def selected(self, beginnings: list[str] | None) -> list[str]:
        """Cases whose name begins so; all for None. Raises SystemExit where nothing does."""
        return selected(self.devices, beginnings)

    def missing(self, names: Iterable[str], force: bool, keep: bool) -> Iterator[str]:
        """Those that nothing is known of, or nothing that still holds."""
        for name in filter(self._asked, names):
            known = None if force else self.results.find(name)
            if known is None or not (keep or known.version == version_here(self.sources)):
                yield name

    def rows(self) -> list[Row]:
        """What is known, in the order of the cases."""
        return self.results.all(filter(self._asked, self.devices))

    def _asked(self, name: str) -> bool:
        """Nothing smaller fits, as far as is known."""
        if name not in self.after:
            return True
        smaller = self.results.find(self.after[name])
        return smaller is not None and smaller.status == "does not fit" and self._asked(smaller.name)


def selected(names: Iterable[str], beginnings: list[str] | None) -> list[str]:
    """Those that begin so; all for None. Raises SystemExit where nothing does."""
    names = list(names)
    lost = [one for one in beginnings or () if not any(name.startswith(one) for name in names)]
    if lost:
        raise SystemExit(f"nothing begins with {', '.join(lost)}; there are {', '.join(names)}")
    return [name for name in names if beginnings is None or name.startswith(tuple(beginnings))]


def line(row: Row) -> str:
    """One row for those who watch."""
    if row.step_s is None or row.plain_step_s is None or row.compiled_bytes is None or row.budget_bytes is None:
        return f"{row.name}: {row.status}, {row.reason}"
    missed = "" if row.missed is None else f", predicted {row.missed:+.2%}"
    cost = "" if row.cost is None else f" ({row.cost:.1f} plain compilations)"
    floor = "" if row.fits or row.floor_bytes is None else f", floor {row.floor_bytes / 2**20:.0f}"
    return (
        f"{row.name}: {row.status}, {row.compiled_bytes / 2**20:.0f} of {row.budget_bytes / 2**20:.0f} MiB{floor}"
        f"{missed}, {1e3 * row.step_s:.1f} against {1e3 * row.plain_step_s:.1f} ms, {row.compilations} compilations, "
        f"ready after {row.ready_s:.0f} s{cost}"
    )


def parser(told: str | None) -> argparse.ArgumentParser:
    """The command line of every suite."""
    made = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", metavar="NAME")
    made.add_argument("--minutes", type=float, default=10.0, help="that a case may take")
    made.add_argument("--summary", action="store_true", help="measure nothing")
    again = made.add_mutually_exclusive_group()
    again.add_argument("--force", action="store_true")
    again.add_argument("--keep", action="store_true")
    return made
