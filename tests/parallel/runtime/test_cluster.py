"""Joining: what is refused at once, and what real processes say."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime import cluster
from memplan.parallel.runtime.cluster import ALONE, initialize
from memplan.parallel.runtime.watchdog import Watchdog


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if jax had not been used, which other tests have long done."""
    monkeypatch.setattr(cluster, "_refuse_late", lambda: None)
    for name in ("MEMPLAN_COORDINATOR", "MEMPLAN_PROCESSES", "MEMPLAN_PROCESS", "MEMPLAN_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_used_jax_is_refused() -> None:
    jax.devices()
    with pytest.raises(MemplanError, match=r"jax was used before memplan\.parallel\.initialize"):
        initialize(processes=1)


def test_alone(fresh: None) -> None:
    found = initialize(processes=1)
    assert (found.process, found.processes, found.how, found.coordinator) == (0, 1, ALONE, "")
    assert found.devices == jax.device_count() and found.monitor is None
    assert "nothing to join" in str(found)
    with Watchdog(found, timeout_s=1e-9).step(1):  # nobody is there to be late for
        pass


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"coordinator": "h:1"}, "give all three"),
        ({"processes": 4, "process": 1}, "give all three"),
        ({"coordinator": "h:1", "processes": 4, "process": 4}, "4 is no rank of 4 processes"),
        ({"coordinator": "h", "processes": 4, "process": 1}, "'h' is no address"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(MemplanError, match=told):
        initialize(**given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh")
def test_a_damaged_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MEMPLAN_PROCESSES", "four")
    with pytest.raises(MemplanError, match="MEMPLAN_PROCESSES is 'four', not a number"):
        initialize()


def initialized(words: str) -> tuple[float, str]:
    """Seconds and the last line of what a fresh process says."""
    program = "import time; from memplan.parallel.runtime.cluster import initialize; t = time.time()\n"
    program += f"try: initialize({words})\n"
    program += "except Exception as e: print(time.time() - t, type(e).__name__, e)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60
    )
    seconds, told = done.stdout.splitlines()[-1].split(" ", 1)
    return float(seconds), told


def test_an_unreachable_coordinator_is_told_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seconds, told = initialized(f"{address!r}, 2, 1, timeout_s=1")
    assert told.startswith(f"MemplanError Rank 1 of 2 could not reach the coordinator {address} within 1 s")
    assert seconds < 3


def test_a_missing_rank_and_a_taken_port_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "another program listens there" in initialized(f"{address!r}, 2, 0, timeout_s=1")[1]
    seconds, told = initialized(f"{address!r}, 3, 0, timeout_s=1")
    assert told.startswith("MemplanError ranks 1, 2 of 3 did not show up within 1 s") and seconds < 3


JOINED = """
import socket, jax
from memplan.errors import MemplanError
from memplan.parallel.runtime.cluster import initialize
with socket.create_server(("127.0.0.1", 0)) as free:
    address = f"127.0.0.1:{free.getsockname()[1]}"
jax.distributed.initialize(address, 1, 0)
print(initialize(), "|", initialize(processes=1, process=0).how)
try: initialize(processes=2, process=1)
except MemplanError as error: print(error)
"""


def test_a_run_that_jax_started_is_joined() -> None:
    """What several processes of such a run do is in test_unlike.py."""
    done = subprocess.run(
        [sys.executable, "-c", JOINED], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60
    )
    told = done.stdout.splitlines()
    assert told[0].startswith("rank 0 of 1") and told[0].endswith("| joined jax.distributed"), done
    assert told[1].startswith("jax.distributed.initialize has made this process rank 0 of 1, not 1 of 2.")
