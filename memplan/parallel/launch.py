"""Starts the processes of a run on this machine, prefixes their output, and restarts them."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, TextIO

from memplan.errors import MemplanError
from memplan.parallel.cluster import variables_of_processes


@dataclass(frozen=True)
class Launch:
    """The processes to start."""

    command: tuple[str, ...]
    processes: int
    devices: int | None = None  # CPU devices of each process; None: jax chooses the devices
    port: int | None = None  # of rank 0; None: a free one
    timeout_s: int = 60  # how long processes wait for one another at the start
    restarts: int = 0  # after a failure
    grace_s: float = 5.0  # from a failure to SIGKILL for the others; SIGTERM comes after half of it


def launch(run: Launch) -> int:
    """Run to the end, restarts included; return the exit code of the first failure, or 0.

    Raises MemplanError, before it starts a process, if there is no such command.
    """
    if shutil.which(run.command[0]) is None:
        raise MemplanError(
            f"There is no program {run.command[0]!r} to start. Is it on the PATH and executable?"
        )
    code = _run_once(run)
    for restart in range(1, run.restarts + 1):
        if code:
            _say(f"starting again, restart {restart} of {run.restarts}")
            code = _run_once(run)
    return code


def _run_once(run: Launch) -> int:
    with socket.create_server(("", run.port or 0)) as server:
        port = server.getsockname()[1]
    variables_of_ranks = variables_of_processes(run.processes, run.devices, port, run.timeout_s)
    # Linux kills the processes if the launcher is killed. A preexec_fn is not safe beside threads.
    tied = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    processes: list[Popen[bytes]] = []
    readers: list[threading.Thread] = []
    try:
        for rank, variables in enumerate(variables_of_ranks):
            process = Popen(
                [*tied, *run.command],
                env={**os.environ, **variables},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # Children end with it; Ctrl-C reaches the launcher only.
            )
            processes.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=_copy, args=(source, target, rank), daemon=True)
                reader.start()
                readers.append(reader)
        code = _first_failure(processes)
        _wait(processes, run.grace_s / 2)
        return code
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            _wait(processes, run.grace_s / 2)
        for reader in readers:
            reader.join(1.0)


def _copy(source: IO[bytes], target: TextIO, rank: int) -> None:
    """Write each line with its rank in front."""
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # A closed target must not block the rank.
                target.buffer.write(b"[%d] %b\n" % (rank, line.rstrip(b"\n")))
                target.buffer.flush()


def _first_failure(processes: Sequence[Popen[bytes]]) -> int:
    """Wait until a process fails or all succeed; its exit code, as a shell gives it, or 0."""
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        time.sleep(0.05)
    rank, code = next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))
    if code > 0:
        _say(f"rank {rank} (pid {processes[rank].pid}) ended with exit code {code}")
    if code < 0:
        _say(f"rank {rank} (pid {processes[rank].pid}) was killed by {signal.Signals(-code).name}")
    return code if code >= 0 else 128 - code


def _wait(processes: Sequence[Popen[bytes]], seconds: float) -> None:
    """Wait until all processes have ended, at most so long."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)


def _say(text: str) -> None:
    print(f"memplan launch: {text}", file=sys.stderr, flush=True)
