"""Runs a module in a process of its own, and reads the JSON that it prints last."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def printed_by(module: str) -> Any:
    """The JSON in its last line."""
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
