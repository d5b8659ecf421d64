"""Real processes with jax and gloo, one of which is unlike the others or leaves: named by all, and no other end.

Started by hand or with `memplan launch`; joined by memplan, by jax alone, or by memplan after jax.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.distributed.failures.run import Run
from memplan.parallel.runtime.monitor import EXIT_CODE

pytestmark = pytest.mark.slow
TRAINER = Path(__file__).parents[1] / "trainer.py"
NAMED_S = 15.0
FROM_THE_START, LATER = "placing", "step 4 "

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def begin(what: str, ill: int, *words: str, processes: int = 2, launched: bool = False) -> Run:
        options = ("--ill", str(ill), "--what", what, *words)
        launcher = ("--devices", "1") if launched else None
        started.append(Run(tmp_path, options, launcher=launcher, processes=processes, script=TRAINER))
        return started[-1]

    yield begin
    for run in started:
        run.wait(0)


def until(run: Run, rank: int, printed: str) -> float:
    end = time.monotonic() + 90
    while printed not in run.output[rank]:
        assert time.monotonic() < end, run.output
        time.sleep(0.005)
    return time.monotonic()


def pids(run: Run) -> list[int]:
    found = [run.pid(rank) for rank in range(run.processes)]
    return [pid for pid in found if pid is not None]


def is_named(output: str, ill: int, told: str) -> bool:
    """By memplan, and nobody else by it."""
    sentences = re.findall(
        r"memplan: rank (\d+) [^\n]*?(brings|gives|has another|left|is gone|has been silent)", output
    )
    return {(int(rank), verb) for rank, verb in sentences} == {(ill, told)}


def ends_named(run: Run, ill: int, told: str, since: str) -> None:
    alive = pids(run)
    begun = until(run, ill, since)
    assert run.wait(NAMED_S + 5), run.output
    assert time.monotonic() - begun < NAMED_S
    for rank in set(range(run.processes)) - {ill}:
        assert is_named(run.output[rank], ill, told), run.output
    assert all(one.returncode for one in run.started)
    assert not [pid for pid in alive if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("what", "ill", "told", "since", "launched"),
    [
        ("seed", 1, "gives", FROM_THE_START, False),
        ("activation", 2, "has another", FROM_THE_START, True),
        ("rate", 1, "has another", FROM_THE_START, False),
        ("rows", 1, "brings", FROM_THE_START, True),
        ("shape", 1, "brings", FROM_THE_START, False),
        ("last", 2, "brings", LATER, False),
        ("last", 1, "brings", LATER, True),
        ("exit0", 2, "left", LATER, False),
        ("exit3", 1, "left", LATER, True),
        ("after", 1, "left", LATER, False),
        ("after", 0, "left", LATER, True),
        ("fewer", 0, "left", LATER, False),
        ("kill", 1, "is gone", LATER, True),
    ],
)
def test_the_odd_rank_is_named_by_all_others_and_nothing_is_left(
    start: Start, what: str, ill: int, told: str, since: str, launched: bool
) -> None:
    ends_named(start(what, ill, processes=3 if ill == 2 else 2, launched=launched), ill, told, since)


@pytest.mark.parametrize(
    ("what", "told", "since", "joined"),
    [("seed", "gives", FROM_THE_START, "--by-jax"), ("after", "left", LATER, "--by-jax"),
     ("activation", "has another", FROM_THE_START, "--late")],
)  # fmt: skip
def test_processes_that_jax_brought_together_are_compared_too(
    start: Start, what: str, told: str, since: str, joined: str
) -> None:
    ends_named(start(what, 1, joined), 1, told, since)


def test_a_stopped_rank_is_named_and_ends_when_it_goes_on(start: Start) -> None:
    run = start("stop", 1)
    until(run, 1, LATER)
    assert run.started[0].wait(NAMED_S) == EXIT_CODE
    run.started[1].send_signal(signal.SIGCONT)
    assert run.wait(5.0) and is_named(run.output[0], 1, "has been silent"), run.output


def test_the_launcher_ends_a_stopped_rank(start: Start) -> None:
    run = start("stop", 1, launched=True)
    alive = pids(run)
    until(run, 1, LATER)
    assert run.wait(NAMED_S) and run.started[0].returncode == EXIT_CODE, run.told
    assert is_named(run.output[0], 1, "has been silent") and f"rank 1 (pid {alive[1]}) still runs: SIGKILL" in run.told
    assert not [pid for pid in alive if Path(f"/proc/{pid}").exists()]


def test_what_is_no_failure_ends_well(start: Start) -> None:
    """Rank 0 goes on alone for 12 s; a rank comes 8 s late; rank 0 alone looks at shapes and places other values."""
    together = [start("alone", 0), start("alone", 0, "--by-jax", launched=True)]  # they mostly sleep
    together += [start("late", 1, launched=True), start("inspect", 0)]
    for run in together:
        assert run.wait(120), run.output
        assert not any(one.returncode for one in run.started), run.output
        assert all("done" in output and "memplan: " not in output for output in run.output), run.output
