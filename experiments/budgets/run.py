"""Plans and compiles every case for its described GPU, each in a process of its own, and keeps one JSON file for each.

    python -m experiments.budgets.run [--only NAME ...] [--minutes 10] [--force | --keep]
    python -m experiments.budgets.run --summary     # truth, time and cost of what is there

`NAME` is a case or the beginning of one. A row that this version of memplan, the models, jax and the compiler made is
not measured again; `--force` measures all, `--keep` only cases that no version has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.budgets.cases import CASES, Case
from experiments.budgets.rows import ROOT, Row, Rows, environment, former, summary, version_here

HERE = Path(__file__).parent
RESULTS, BEFORE = Rows(HERE / "results"), HERE / "before.json"
_SHOWN = 2000  # characters of what a process that failed wrote last


def measured(case: Case, minutes: float) -> Row:
    """The row of a case; where its process fails or takes too long, why."""
    command = [sys.executable, "-m", "experiments.budgets.measure", case.name]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60 * minutes, check=False, env=settings, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return failed(case, f"was not ready after {minutes:g} minutes")
    if done.returncode:
        return failed(case, f"ended with code {done.returncode}: {done.stderr[-_SHOWN:]}")  # a bug is a finding, too
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def failed(case: Case, reason: str) -> Row:
    return Row(case.name, case.device, version_here(), "failed", reason=reason, environment=environment())


def selected(names: list[str] | None) -> list[Case]:
    """Cases whose name begins with one of `names`; all for None. Raises SystemExit where a name fits nothing."""
    if not names:
        return list(CASES.values())
    lost = [name for name in names if not any(case.startswith(name) for case in CASES)]
    if lost:
        raise SystemExit(f"no case begins with {', '.join(lost)}; there are {', '.join(CASES)}")
    return [case for name, case in CASES.items() if name.startswith(tuple(names))]


def missing(cases: list[Case], force: bool, keep: bool) -> Iterator[Case]:
    """Those that nothing is known of, or nothing that still holds."""
    for case in cases:
        known = None if force else RESULTS.find(case.name)
        if known is None or not (keep or known.version == version_here()):
            yield case


def told() -> list[str]:
    """The summary of what is there."""
    half = [name for name, case in CASES.items() if case.budget == 50]
    return summary(RESULTS.all(CASES), former(BEFORE), half)


def line(row: Row) -> str:
    """One row for those who watch."""
    if row.step_s is None or row.plain_step_s is None or row.compiled_bytes is None or row.budget_bytes is None:
        return f"{row.name}: {row.status}, {row.reason}"
    missed = "" if row.missed is None else f", predicted {row.missed:+.2%}"
    cost = "" if row.cost is None else f" ({row.cost:.1f} plain compilations)"
    return (
        f"{row.name}: {row.status}, {row.compiled_bytes / 2**20:.0f} of {row.budget_bytes / 2**20:.0f} MiB{missed}, "
        f"{1e3 * row.step_s:.1f} against {1e3 * row.plain_step_s:.1f} ms, {row.compilations} compilations, "
        f"ready after {row.ready_s:.0f} s{cost}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=10.0, help="that a case may take")
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--force", action="store_true")
    again.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    for case in [] if args.summary else missing(selected(args.only), args.force, args.keep):
        row = measured(case, args.minutes)
        RESULTS.keep(row)
        print(line(row), flush=True)
    print("\n".join(told()))


if __name__ == "__main__":
    main()
