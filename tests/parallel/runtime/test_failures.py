"""Four real processes with jax and gloo: killed, hung, unlike one another, and gone on from their checkpoint.

experiments/distributed/failures has many more moments.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.distributed.failures.run import Run, losses, names
from memplan.parallel.runtime.monitor import EXIT_CODE

pytestmark = pytest.mark.slow
SHORT = ("--steps", "30", "--every", "5")


@dataclass(frozen=True)
class Undisturbed:
    """Losses, and the line about the state that is divided like the batch."""

    losses: dict[int, str]
    seen: str


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(folder, SHORT)
    assert run.wait(120) and [one.returncode for one in run.started] == [0] * 4
    return Undisturbed(losses(folder), seen(run))


def seen(run: Run) -> str:
    (line,) = (line for line in run.output[0].splitlines() if line.startswith("seen "))
    return line


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.wait(0)


def until(run: Run, rank: int, printed: str) -> None:
    end = time.monotonic() + 120
    while printed not in run.output[rank]:
        assert time.monotonic() < end and any(one.poll() is None for one in run.started), run.output
        time.sleep(0.002)


def values(found: dict[int, str]) -> list[float]:
    return [float.fromhex(found[step]) for step in sorted(found)]


@pytest.mark.parametrize("rank", [0, random.Random().randrange(1, 4)], ids=["rank 0", "another"])
def test_by_hand_a_kill_is_named_by_all_and_two_go_on(
    undisturbed: Undisturbed, runs: list[Run], tmp_path: Path, rank: int
) -> None:
    runs.append(run := Run(tmp_path, SHORT))
    until(run, rank, "step 11 ")
    time.sleep(random.uniform(0.0, 0.5))
    run.started[rank].kill()
    killed = time.monotonic()
    assert run.wait(20)
    assert time.monotonic() - killed < 5
    for other in set(range(4)) - {rank}:
        assert names(run.output[other], rank), run.output[other]
        assert "is gone" in run.output[other]
        assert run.started[other].returncode in (EXIT_CODE, -signal.SIGABRT)  # jax may be quicker after rank 0's death
    runs.append(run := Run(tmp_path, SHORT, processes=2))
    assert run.wait(120) and [one.returncode for one in run.started] == [0, 0], run.output
    assert "resumed at " in run.output[1]
    kept = {step: loss.split("|")[0] for step, loss in losses(tmp_path).items()}
    assert values(kept) == pytest.approx(values(undisturbed.losses), rel=1e-5)
    assert seen(run) == undisturbed.seen


def test_the_launcher_starts_again_and_the_losses_are_the_same(
    undisturbed: Undisturbed, runs: list[Run], tmp_path: Path
) -> None:
    runs.append(run := Run(tmp_path, SHORT, launcher=("--restarts", "1", "--devices", "1")))
    until(run, 2, "step 8 ")
    pid = run.pid(2)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert run.wait(120) and run.started[0].returncode == 0, run.told
    assert f"rank 2 (pid {pid}) was killed by SIGKILL" in run.told and "restart 1 of 1" in run.told
    assert "resumed at " in run.output[0]
    assert losses(tmp_path) == undisturbed.losses
    assert seen(run) == undisturbed.seen


def test_a_rank_that_hangs_is_named_within_the_limit(runs: list[Run], tmp_path: Path) -> None:
    words = ("--hang-rank", "1", "--hang-step", "6", "--watchdog-s", "3", "--every", "100")  # no save takes so long
    runs.append(run := Run(tmp_path, (*SHORT, *words)))
    until(run, 1, "step 5 ")
    assert run.wait(30)
    assert [one.returncode for one in run.started] == [EXIT_CODE] * 4, run.output
    assert all("is late, last beat at step 5" in output and names(output, 1) for output in run.output), run.output


def test_ranks_that_disagree_end_with_the_odd_one_named(runs: list[Run], tmp_path: Path) -> None:
    runs.append(run := Run(tmp_path, (*SHORT, "--odd-rank", "3")))
    assert run.wait(60)
    assert all(one.returncode in (1, EXIT_CODE) for one in run.started)
    assert all("disagree on the batch: rank 3 (" in output for output in run.output), run.output
    assert "has (67, 8), rank 0 (" in run.output[1]
