"""What does a release of jax change? `memplan check` of a report that the older jax saved."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench.cases import Case
from experiments.bench.results import ROOT, Measurement

VARIABLE = "MEMPLAN_OLDER_PYTHON"
_MEMPLAN = "from memplan.cli import main; main()"


def older_python() -> str:
    """The interpreter of an environment with the older jax."""
    if not (python := os.environ.get(VARIABLE)):
        raise SystemExit(
            f"releases: which environment has the older jax? Set {VARIABLE}=.../bin/python."
        )
    return python


def measure(case: Case) -> Measurement:
    """One row: the figures of both, and the buffer at the peak that grew most."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "difference.json"
        words = [
            "check",
            case.facts["call"],
            "--against",
            f"{folder}/saved.json",
            "--device",
            case.device,
        ]
        _run(older_python(), *words, "--save")
        code = _run(sys.executable, *words, "--json", str(path))
        difference = json.loads(path.read_text())
    old, new = difference["old"], difference["new"]
    more = [buffer["new_bytes"] - buffer["old_bytes"] for buffer in difference["buffers"]]
    largest = difference["buffers"][0] if more and more[0] > 0 else None
    row: dict[str, Any] = {
        "old_jax": dict(old["versions"])["jax"],
        "jax": dict(new["versions"])["jax"],
        "old_bytes": old["compiled_bytes"],
        "compiled_bytes": new["compiled_bytes"],
        "old_step_s": old["step_s"],
        "step_s": new["step_s"],
        "exit_code": code,
        "grown": sum(nbytes > 0 for nbytes in more),
        "grown_bytes": sum(nbytes for nbytes in more if nbytes > 0),
        "shrunk": sum(nbytes < 0 for nbytes in more),
        "shrunk_bytes": -sum(nbytes for nbytes in more if nbytes < 0),
        "largest": largest
        and {name: largest[name] for name in ("kind", "new_shape", "source", "name")},
        "largest_bytes": more[0] if largest else 0,
    }
    return Measurement([row])


def _run(python: str, *words: str) -> int:
    """Run memplan; returns its exit code, 1 if the step grew."""
    done = subprocess.run(
        [python, "-c", _MEMPLAN, *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"memplan {' '.join(words)} of {python} ended with {done.returncode}: {done.stderr}"
        )
    return done.returncode
