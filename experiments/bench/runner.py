"""Measures cases, each in a process of its own with a time limit, and stores the results."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from experiments.bench.cases import Case
from experiments.bench.questions import Question
from experiments.bench.results import ROOT, Measurement, Result, measured_here, stored_result

_SHOWN = 2000  # Characters of a failed process's stderr to keep.


def alone(question: Question, case: Case) -> Result:
    """Measure a case in this process."""
    return measured_here(question.name, case.name, question.measure(case), question.sources)


def apart(question: Question, case: Case, minutes: float | None = None) -> Result:
    """Measure a case in a process of its own; the result says why if it fails or takes too long."""
    limit = minutes or case.minutes
    command = [sys.executable, "-m", "experiments.bench", question.name, "--alone", case.name]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": path}
    reason = f"was not ready after {limit:g} minutes"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60 * limit,
            check=False,
            env=settings,
            cwd=ROOT,
        )
        if not done.returncode:
            return Result(**json.loads(done.stdout.splitlines()[-1]))
        reason = f"ended with code {done.returncode}: {done.stderr[-_SHOWN:]}"
    return measured_here(
        question.name, case.name, Measurement((), "failed", reason), question.sources
    )  # failing is a result too


def selected(question: Question, beginnings: list[str] | None) -> list[Case]:
    """Cases whose names begin with one of `beginnings`; None selects all."""
    wanted = None if beginnings is None else tuple(beginnings)
    return [
        case for name, case in question.cases.items() if wanted is None or name.startswith(wanted)
    ]


def missing(question: Question, cases: Iterable[Case], force: bool, keep: bool) -> Iterator[Case]:
    """Cases without a result, or with an outdated one."""
    for case in cases:
        result = None if force else stored_result(question.name, case.name)
        if question.asks(case) and (
            result is None or not (keep or result.is_of_today(question.sources))
        ):
            yield case
