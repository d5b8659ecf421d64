"""Starts the processes of a run, one by one or by `memplan launch`."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, "-c", "from memplan.cli import main; main()", "launch")


@dataclass(frozen=True)
class Ended:
    """One process at its end: exit code, combined output, and seconds since the epoch."""

    code: int
    output: str
    at_s: float


def by_hand(
    script: Path, processes: int, words: Sequence[str], stopped: int | None = None
) -> list[Ended]:
    """Start one process for each rank; kill a stopped one, and any after two minutes.

    No process ends the others when one fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "MEMPLAN_COORDINATOR": f"127.0.0.1:{port}",
        "MEMPLAN_PROCESSES": str(processes),
        "MEMPLAN_DEVICES": "1",
    }
    start_s = time.time()
    files = [tempfile.TemporaryFile("w+") for _ in range(processes)]  # noqa: SIM115
    command, started = [sys.executable, "-u", str(script), *words], list[subprocess.Popen[str]]()
    for rank, file in enumerate(files):
        own = {**environment, "MEMPLAN_PROCESS": str(rank)}
        started.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
    ended_s = {}
    while time.time() < start_s + 120 and len(ended_s.keys() - {stopped}) < processes - (
        stopped is not None
    ):
        for rank, process in enumerate(started):
            if rank not in ended_s and process.poll() is not None:
                ended_s[rank] = time.time()
        time.sleep(0.02)
    ended = []
    for rank, (process, file) in enumerate(zip(started, files, strict=True)):
        process.kill()
        process.wait()
        file.seek(0)
        ended.append(Ended(process.returncode, file.read(), ended_s.get(rank, float("inf"))))
        file.close()
    return ended


def launched(
    script: Path, processes: int, *words: str, options: Sequence[str] = ()
) -> tuple[int, str]:
    """Exit code and output of `memplan launch`."""
    devices = f"-n {processes} --devices 1".split()
    command = [*LAUNCH, *devices, *options, "--", sys.executable, str(script), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr
