"""Real processes that only watch one another: how each ends, and whom it names. Quick, since they leave jax alone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.parallel.runtime.monitor import EXIT_CODE

ROOT = Path(__file__).parents[3]
WATCHING = """
import os, socket, sys, time, types
sys.modules["memplan.parallel"] = bare = types.ModuleType("memplan.parallel")
bare.__path__ = ["memplan/parallel"]  # without what it imports: jax takes seconds, four at a time
from memplan.parallel.runtime import rendezvous
from memplan.parallel.runtime.submissions import Submissions
from memplan.parallel.runtime.comparison import PROGRAM, ROWS, VALUES, submission
from memplan.parallel.runtime.heartbeats import Member
from memplan.parallel.runtime.monitor import Monitor
address, processes, rank, limit_s, ill, what = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4]), *sys.argv[5:7]
me = Member(rank, "host", os.getpid())
if rank == 0:
    connections, members = rendezvous.meet(address, me, processes, 20)
else:
    connection, members = rendezvous.join(address, me, processes, 20)
    connections = {0: connection}
class Observer:  # what the main thread waits for, as it says itself
    since_s, waiting = 0.0, False
    def sample(self, now_s): return now_s - self.since_s
    def waits_for(self, left): return self.waiting
    def waits_for_thread(self): return False
    def where(self): return "here.py:1"
given, observer = Submissions(), Observer()
def give(kind, text): return submission(kind, "k", "'step'", [text], tuple(range(processes)))
monitor = Monitor(me, members, connections, 2.0, given, observer)
monitor.start()
print("met", flush=True)
odd = str(rank == int(ill))
if what == "values":
    given.submit_values(give(VALUES, odd))
if what == "program":
    time.sleep(0.3 * rank)
    given.submit_program(give(PROGRAM, odd))
for step in range(40 if what == "finish" else 100_000):
    if rank == int(ill) and step == 20:
        if what == "hang":
            time.sleep(1000)
        if what in ("leave", "behind"):
            break
        if what == "fail":
            monitor.fail("ValueError: bad data")
    if what in ("rows", "values", "leave", "behind", "alone") and step <= 20 - (what == "leave"):
        given.submit_rows(give(ROWS, odd if what == "rows" and step == 20 else "same"))
    if what == "alone" and step == 30 and rank != int(ill):
        break
    if what in ("leave", "behind") and step == 20:
        observer.since_s, observer.waiting = time.monotonic(), True
        time.sleep(1000)
    if what == "alone" and step == 30:
        observer.since_s = time.monotonic()
        time.sleep(7)
        break
    if what != "hang" or step <= 20:  # a collective that one process does not come to
        monitor.heartbeat = monitor.heartbeat.next(step, time.monotonic(), limit_s)
    time.sleep(0.02)
monitor.finish()
in_jax_s = 1000 if what in ("leave", "behind") else 8 if what == "alone" and rank != int(ill) else 0.3 * rank
time.sleep(in_jax_s)
"""


class Watching:
    """Four of them; what each printed after its end."""

    def __init__(self, ill: int = -1, what: str = "", limit_s: float = 1.0):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        words = [sys.executable, "-c", WATCHING, address, "4"]
        self.started = [
            subprocess.Popen(
                [*words, str(rank), str(limit_s), str(ill), what],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]

    def met(self) -> Watching:
        for one in self.started:
            assert one.stdout is not None and one.stdout.readline() == "met\n"
        time.sleep(0.6)  # some beats
        return self

    def ends(self, seconds: float, *, but: int = -1) -> dict[int, tuple[int, str]]:
        """Exit code and standard error of each, and that they came in time."""
        end = time.monotonic() + seconds
        found = {}
        for rank, one in enumerate(self.started):
            if rank != but:
                _, told = one.communicate(timeout=max(0.1, end - time.monotonic()))
                found[rank] = one.returncode, told
        return found

    def close(self) -> None:
        for one in self.started:
            one.kill()
            one.communicate()


@pytest.fixture
def watching() -> Callable[..., Watching]:
    runs: list[Watching] = []

    def start(*args: object, **options: object) -> Watching:
        runs.append(Watching(*args, **options))  # type: ignore[arg-type]
        return runs[-1].met()

    yield start  # type: ignore[misc]
    for run in runs:
        run.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_is_named_by_all_at_once(watching: Callable[..., Watching], rank: int) -> None:
    run = watching(limit_s=60.0)
    run.started[rank].kill()
    for other, (code, told) in run.ends(3.0, but=rank).items():
        assert code == EXIT_CODE
        assert f"rank {rank} (host host, pid {run.started[rank].pid}) is gone: its connection closed; last beat" in told
        assert f"memplan: rank {other} (host host" in told


def test_a_stopped_process_is_named_and_ends_when_it_goes_on(watching: Callable[..., Watching]) -> None:
    run = watching(limit_s=60.0)
    run.started[1].send_signal(signal.SIGSTOP)
    for code, told in run.ends(6.0, but=1).values():
        assert code == EXIT_CODE
        assert "rank 1 (host host" in told and "has been silent for 2." in told
    run.started[1].send_signal(signal.SIGCONT)
    assert run.started[1].wait(5.0) == EXIT_CODE


def test_a_stopped_rank_0_is_named(watching: Callable[..., Watching]) -> None:
    run = watching(limit_s=60.0)
    run.started[0].send_signal(signal.SIGSTOP)
    for code, told in run.ends(6.0, but=0).values():
        assert code == EXIT_CODE and "rank 0 (host host" in told and "silent" in told


def test_a_rank_that_stands_still_is_named_by_all_and_itself(watching: Callable[..., Watching]) -> None:
    run = watching(3, "hang")
    for code, told in run.ends(6.0).values():
        assert code == EXIT_CODE
        assert "rank 3 (host host" in told and "is late, last beat at step 19" in told
        assert "waiting further on: rank 0, 1, 2; the limit is 1 s" in told


@pytest.mark.parametrize("rank", [0, 2])
def test_why_a_rank_failed_is_told_by_the_others(watching: Callable[..., Watching], rank: int) -> None:
    ends = watching(rank, "fail", 60.0).ends(6.0)
    assert ends[rank][0] == 1
    for other in set(ends) - {rank}:
        assert ends[other][0] == EXIT_CODE
        assert f"memplan: rank {rank} (host host" in ends[other][1] and "failed: ValueError: bad data" in ends[other][1]


def test_processes_that_finish_at_different_times_end_well(watching: Callable[..., Watching]) -> None:
    assert [code for code, _ in watching(what="finish").ends(6.0).values()] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", "brings other rows to 'step' in batch 21 than rank 0"),
        ("values", "gives other values to 'step' than rank 0"),
        ("program", "has another program for 'step' than rank 0"),
    ],
)
@pytest.mark.parametrize("rank", [1, 3])
def test_the_odd_rank_is_named_by_all(watching: Callable[..., Watching], rank: int, what: str, told: str) -> None:
    ends = watching(rank, what, 60.0).ends(6.0)
    for code, output in ends.values():
        assert code == EXIT_CODE and f"memplan: rank {rank} (host host" in output and told in output, ends


@pytest.mark.parametrize(("what", "rank", "seconds"), [("behind", 2, 5.0), ("leave", 0, 9.0)])
def test_a_rank_that_leaves_while_others_wait_is_named_by_all(
    watching: Callable[..., Watching], what: str, rank: int, seconds: float
) -> None:
    """With fewer batches than the others have begun, or with as many."""
    ends = watching(rank, what, 60.0).ends(seconds)
    for code, output in ends.values():
        assert code == EXIT_CODE and f"rank {rank} (host host" in output and " left " in output, ends
        assert "with 20 batches begun, while rank" in output and "waits at here.py:1" in output


def test_a_rank_may_go_on_alone_after_the_others_left(watching: Callable[..., Watching]) -> None:
    ends = watching(0, "alone", 60.0).ends(15.0)
    assert all(code == 0 and output == "" for code, output in ends.values()), ends
