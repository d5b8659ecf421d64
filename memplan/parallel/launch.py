"""Starts the processes of one run on this machine, prefixes their output, ends them together, restarts them on request.

Slurm, Open MPI and Kubernetes start processes themselves and need none of this.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from memplan.errors import MemplanError

_POLL_S = 0.05
# Linux kills (9) the process when its parent, the launcher, ends in any way (PR_SET_PDEATHSIG is 1). These lines set it
# and then become the command: a preexec_fn is not safe in a process with threads.
_TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])"""


@dataclass(frozen=True)
class Launch:
    """What to start."""

    command: tuple[str, ...]
    processes: int
    devices: int | None = None  # CPU devices of each process; None: jax chooses the devices
    port: int | None = None  # of rank 0; None: a free one
    timeout_s: int = 60  # for which processes wait for one another at the start
    restarts: int = 0  # after a failure
    grace_s: float = 5.0  # for the others to end after a failure: SIGTERM after half of it, SIGKILL at its end


def launch(wanted: Launch) -> int:
    """Run to the end, restarts included; return the exit code of the first process that failed, 0 if none did.

    Raises:
      MemplanError: the command or the port cannot be used, or the GPUs cannot be divided. Nothing has been started.
    """
    if not wanted.command:
        raise MemplanError("There is nothing to start. Write the command after --, as in: -n 4 -- python train.py")
    if shutil.which(wanted.command[0]) is None:
        raise MemplanError(f"There is no program {wanted.command[0]!r} to start. Is it on the PATH and executable?")
    gpus_each, code = _gpus_each(wanted), 0
    for attempt in range(wanted.restarts + 1):
        if attempt:
            _say(f"starting again, restart {attempt} of {wanted.restarts}")
        try:
            with socket.create_server(("", wanted.port or 0)) as door:
                port = door.getsockname()[1]
        except OSError as error:
            raise MemplanError(
                f"Port {wanted.port} cannot be used: {error.strerror}. Take another, or none for a free one."
            ) from error
        environments = [_environment(wanted, rank, port, attempt, gpus_each) for rank in range(wanted.processes)]
        code = _run(wanted.command, environments, wanted.grace_s)
        if code == 0:
            break
    return code


def _gpus_each(wanted: Launch) -> int:
    """GPUs for each process; 0 if there are none or CPU devices were asked for."""
    if wanted.devices is not None or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    listed, folder = os.environ.get("CUDA_VISIBLE_DEVICES"), Path("/proc/driver/nvidia/gpus")
    if listed is not None:
        gpus = len(listed.split(",")) if listed else 0
    else:
        gpus = len(list(folder.iterdir())) if folder.is_dir() else 0
    if gpus % wanted.processes:
        raise MemplanError(
            f"{gpus} GPUs cannot be divided among {wanted.processes} processes. Start a number that divides them, show "
            "fewer with CUDA_VISIBLE_DEVICES, or use CPU devices with --devices."
        )
    return gpus // wanted.processes


def _environment(wanted: Launch, rank: int, port: int, attempt: int, gpus_each: int) -> Mapping[str, str]:
    variables = {
        "MEMPLAN_COORDINATOR": f"127.0.0.1:{port}",
        "MEMPLAN_PROCESSES": str(wanted.processes),
        "MEMPLAN_PROCESS": str(rank),
        "MEMPLAN_TIMEOUT": str(wanted.timeout_s),
        "MEMPLAN_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",  # or lines would come late, and those of a killed process never
    }
    if wanted.devices is not None:
        variables |= {"MEMPLAN_DEVICES": str(wanted.devices), "JAX_PLATFORMS": "cpu"}
    if gpus_each:
        first = rank * gpus_each
        variables["MEMPLAN_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + gpus_each)))
    return {**os.environ, **variables}


def _run(command: Sequence[str], environments: Sequence[Mapping[str, str]], grace_s: float) -> int:
    """Run one process for each environment; return the exit code of the first that fails, as a shell would, or 0."""
    started: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    tied = [sys.executable, "-SEc", _TIED, str(os.getpid())] if sys.platform == "linux" else []
    try:
        for rank, environment in enumerate(environments):
            # In a group of its own: its children end with it, and Ctrl-C reaches the launcher alone.
            process = subprocess.Popen(
                [*tied, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            started.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                readers.append(threading.Thread(target=_copy, args=(source, target, rank), daemon=True))
                readers[-1].start()
        return _wait(started, grace_s)
    except SystemExit as stopped:
        _say(f"stopped by {signal.Signals(int(str(stopped.code)) - 128).name}: ending all processes")
        _end(started, grace_s)
        raise
    finally:
        for process in started:  # children of a rank may outlive it
            _signal(process, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(1.0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _copy(source: BinaryIO, target: TextIO, rank: int) -> None:
    """Write each line with its rank in front."""
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # the target is closed; the process must not wait for that
                target.buffer.write(f"[{rank}] ".encode() + line.rstrip(b"\n") + b"\n")
                target.buffer.flush()


def _wait(started: Sequence[subprocess.Popen[bytes]], grace_s: float) -> int:
    """Wait until all have ended well, or one has failed; then end the others."""
    while not (failed := [rank for rank, process in enumerate(started) if process.poll()]):
        if all(process.returncode == 0 for process in started):
            return 0
        time.sleep(_POLL_S)
    first = started[failed[0]].returncode
    _say(_ended(failed[0], started[failed[0]]))
    _end(started, grace_s / 2, alone_s=grace_s / 2)
    for rank, process in enumerate(started):
        if process.returncode and rank != failed[0]:
            _say(f"afterwards {_ended(rank, process)}")
    return first if first > 0 else 128 - first


def _ended(rank: int, process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} (pid {process.pid}) {how}"


def _end(started: Sequence[subprocess.Popen[bytes]], grace_s: float, alone_s: float = 0.0) -> None:
    """Wait `alone_s` for those that still run, then send SIGTERM, and SIGKILL after `grace_s`."""
    for number, seconds in ((None, alone_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        for rank, process in enumerate(started):
            if number is not None and process.poll() is None:
                _say(f"rank {rank} (pid {process.pid}) still runs: {number.name}")
                _signal(process, number)
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            time.sleep(_POLL_S)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _say(text: str) -> None:
    print(f"memplan launch: {text}", file=sys.stderr, flush=True)
