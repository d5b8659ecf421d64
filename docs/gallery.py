"""Runs the scripts of the gallery, with memplan and without, for its page.

python docs/gallery.py NAME [--plain]    # the last line is what `Run` has, as JSON
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memplan import Report
from memplan.units import format_bytes, format_seconds

EXAMPLES = Path(__file__).parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
_CHANGED = re.compile(r"^( *).*memplan\..*  # was: (.*)$", re.MULTILINE)
_STEPS = ("planned", "p_train_step", "train_step")  # names in the scripts


@dataclass(frozen=True)
class Run:
    """What a script did.

    Attributes:
      losses: of its steps.
      report: of its planned step; None without memplan.
      printed: what `print(report)` prints; '' without memplan.
      seconds: measured, of the whole script: imports, compilation, planning, steps.
    """

    losses: list[float]
    report: Report | None
    printed: str
    seconds: float


def source_of(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text()


def without(source: str) -> tuple[str, int]:
    """A script without memplan, and how many lines were changed for it."""
    source = source.replace("import memplan\n", "")
    return _CHANGED.subn(lambda match: "" if match[2] == "nothing" else match[1] + match[2], source)


@cache
def run(name: str, *, plain: bool = False) -> Run:
    """Run a script in a process of its own; `plain` is without memplan.

    Raises:
      subprocess.CalledProcessError: it failed; its own error is on standard error.
    """
    root = Path(__file__).parents[1]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "error", __file__, name, *["--plain"] * plain]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(process.stdout.splitlines()[-1])
    report = result["report"] and Report.from_json(result["report"])
    losses = [float.fromhex(loss) for loss in result["losses"]]
    return Run(losses, report, result["printed"], result["seconds"])


def main(name: str, *options: str) -> None:
    source = source_of(name)
    began, namespace = time.perf_counter(), dict[str, Any]({"__name__": "__main__"})
    exec(compile(without(source)[0] if "--plain" in options else source, EXAMPLES / f"{name}.py", "exec"), namespace)
    seconds = time.perf_counter() - began
    steps = map(namespace.get, _STEPS)
    report = next((step.report for step in steps if hasattr(step, "report")), None)
    losses = [loss.hex() for loss in namespace["losses"]]
    printed = str(report or "")
    print(json.dumps({"losses": losses, "report": report and report.to_json(), "printed": printed, "seconds": seconds}))


def overview() -> str:
    """A row of Markdown for each script."""
    head = "| script | bytes | planned | step | planned |\n|---|---:|---:|---:|---:|\n"
    rows = "\n".join(f"| {name} | {' | '.join(_figures(name))} |" for name in NAMES)
    return head + rows.replace(" MiB", "\N{NO-BREAK SPACE}MiB").replace(" ms", "\N{NO-BREAK SPACE}ms")


def shown(name: str) -> str:
    """One script in Markdown: what it is, the lines that memplan changes, seconds, the first tables of the report."""
    source, docstring = source_of(name), source_of(name).split('"""')[1]
    lines = difflib.unified_diff(without(source)[0].splitlines(), source.splitlines(), n=0, lineterm="")
    changed = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    screen = run(name).printed.partition("\n\nOn the device at the peak")[0].strip()
    took = f"The script took {run(name, plain=True).seconds:.1f} s without and {run(name).seconds:.1f} s with memplan."
    return f"{docstring.strip()}\n\n```diff\n{changed}\n```\n\n{took}\n\n```text\n{screen}\n```"


def _figures(name: str) -> tuple[str, ...]:
    """Of a script that keeps its budget and trains as without memplan, to the last bit; else the page is not built."""
    planned, plain = run(name), run(name, plain=True)
    report = planned.report
    assert report is not None and report.planner != "none", name
    assert report.compiled_peak_bytes <= report.budget_bytes < 0.82 * report.baseline_peak_bytes, name
    assert planned.losses == plain.losses and planned.losses[-1] < planned.losses[0], name
    sizes = format_bytes(report.baseline_peak_bytes), format_bytes(report.compiled_peak_bytes)
    times = format_seconds(report.baseline_step_s), format_seconds(report.predicted_step_s)
    return *sizes, *times


if __name__ == "__main__":
    main(*sys.argv[1:])
