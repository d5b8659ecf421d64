"""Joining a run: what is refused at once, and how processes end when one of them does."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from memplan.errors import MemplanError
from memplan.parallel import cluster
from memplan.parallel.cluster import initialize
from tests.parallel.processes import ROOT, by_hand, launched

TRAINER = Path(__file__).parent / "trainer.py"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other test had used jax."""
    monkeypatch.setattr(cluster, "_refuse_late", lambda: None)
    for name in ("MEMPLAN_COORDINATOR", "MEMPLAN_PROCESSES", "MEMPLAN_PROCESS", "MEMPLAN_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_used_jax_is_refused() -> None:
    jax.devices()
    with pytest.raises(MemplanError, match=r"jax was used before memplan\.parallel\.initialize"):
        initialize(processes=1)


def test_alone(fresh: None) -> None:
    cluster = initialize(processes=1)
    assert (cluster.process, cluster.processes, cluster.devices) == (0, 1, jax.device_count())
    assert str(cluster) == f"one process, {jax.device_count()} device(s)"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "h:1"}, "give all three"),
        ({"processes": 4, "process": 1}, "give all three"),
        ({"coordinator": "h:1", "processes": 4, "process": 4}, "4 is no rank of 4 processes"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(MemplanError, match=message):
        initialize(**arguments)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh")
def test_a_damaged_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MEMPLAN_PROCESSES", "four")
    with pytest.raises(MemplanError, match="MEMPLAN_PROCESSES is 'four', not a number"):
        initialize()


ADOPTED = """
import socket, jax
from memplan.errors import MemplanError
from memplan.parallel import initialize
with socket.create_server(("127.0.0.1", 0)) as free:
    address = f"127.0.0.1:{free.getsockname()[1]}"
jax.distributed.initialize(address, 1, 0)
print(initialize() == initialize(processes=1, process=0))
try: initialize(processes=2, process=1)
except MemplanError as error: print(error)
"""


def test_a_run_that_jax_started_is_adopted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADOPTED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True", done
    assert lines[1].startswith(
        "jax.distributed.initialize has made this process rank 0 of 1, not 1 of 2."
    )


@pytest.mark.slow  # test_one_plan.py has two processes end well by default
def test_a_run_of_three_ends_well_and_all_see_the_same_losses() -> None:
    code, output = launched(TRAINER, 3)
    assert code == 0, output
    losses = [re.findall(rf"\[{rank}\] (step .*)", output) for rank in range(3)]
    assert len(losses[0]) == 8 and losses[0] == losses[1] == losses[2]
    assert "acting" in output and output.count("done") == 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "leave", "raise"])
def test_a_rank_that_ends_early_ends_the_others_within_30_seconds(fault: str) -> None:
    ended = by_hand(
        TRAINER, 3, ("--odd", "1", "--what", fault), stopped=1 if fault == "stop" else None
    )
    acted = re.search(r"acting at ([\d.]+)", ended[1].output)
    assert acted, ended[1].output
    for rank in (0, 2):
        # by itself, and with an error
        assert ended[rank].code not in (0, -9), ended[rank].output[-2000:]
        assert ended[rank].at_s - float(acted[1]) < 30 and "done" not in ended[rank].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("seed", r"differ in what they give 'step': state\['w'\] on rank 1"),
        ("shape", "the types of its arguments on rank 1"),
        ("rate", "its equations on rank 1"),
    ],
)
def test_a_rank_that_differs_is_refused_before_the_first_step(fault: str, message: str) -> None:
    for rank, process in enumerate(by_hand(TRAINER, 3, ("--odd", "1", "--what", fault))):
        assert re.search(message, process.output), (rank, process.output[-2000:])
        assert "step 0" not in process.output and process.code == 1
