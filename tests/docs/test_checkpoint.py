"""The example with Orbax, killed while it saves: it resumes, and its losses are to the bit those of a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "orbax_checkpoint.py"


def losses(folder: Path, killed_at: int | None = None) -> dict[int, str]:
    """Run the example, and kill it as soon as it has begun to save this step."""
    environment = {**os.environ, "CHECKPOINTS": str(folder)}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE)], env=environment, stdout=subprocess.PIPE, text=True
    )
    losses_by_step = {}
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("step"):
                _, number, loss = line.split()
                losses_by_step[int(number)] = loss
                if int(number) == killed_at:
                    process.kill()
    assert process.wait() == (0 if killed_at is None else -9)
    return losses_by_step


@pytest.mark.slow
def test_a_training_killed_while_saving_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole")
    parts = [losses(tmp_path / "killed", moment) for moment in (2, 5, None)]
    assert list(whole) == list(range(9))
    assert parts[0].keys() <= set(range(9)) and min(parts[1]) > 0 and min(parts[2]) > min(parts[1])
    for part in parts:
        assert part == {number: whole[number] for number in part}
    assert max(parts[2]) == 8
