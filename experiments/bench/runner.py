"""Measures cases, each in a process of its own with a limit of time, and keeps what was found."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from experiments.bench.cases import Case
from experiments.bench.questions import Question
from experiments.bench.results import ROOT, Found, Result, known, made_here

_SHOWN = 2000  # characters of what a process that failed wrote last


def alone(question: Question, case: Case) -> Result:
    """Measured in this process."""
    return made_here(question.name, case.name, question.measure(case), question.sources)


def apart(question: Question, case: Case, minutes: float | None = None) -> Result:
    """Measured in a process of its own; where that fails or takes too long, why."""
    limit = minutes or case.minutes
    command = [sys.executable, "-m", "experiments.bench", question.name, "--alone", case.name]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": path}
    reason = f"was not ready after {limit:g} minutes"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60 * limit, check=False, env=settings, cwd=ROOT
        )
        if not done.returncode:
            return Result(**json.loads(done.stdout.splitlines()[-1]))
        reason = f"ended with code {done.returncode}: {done.stderr[-_SHOWN:]}"
    return made_here(question.name, case.name, Found((), "failed", reason), question.sources)  # a finding, too


def selected(question: Question, beginnings: list[str] | None) -> list[Case]:
    """Those whose names begin so; all for None."""
    wanted = None if beginnings is None else tuple(beginnings)
    return [case for name, case in question.cases.items() if wanted is None or name.startswith(wanted)]


def missing(question: Question, cases: Iterable[Case], force: bool, keep: bool) -> Iterator[Case]:
    """Those that nothing is known of, or nothing that still holds."""
    for case in cases:
        found = None if force else known(question.name, case.name)
        if question.asks(case) and (found is None or not (keep or found.is_of_today(question.sources))):
            yield case
