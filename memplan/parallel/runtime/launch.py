"""Start the processes of one run on this machine, again after a failure if so wanted.

Where Slurm, Open MPI or Kubernetes starts the processes, nothing of this is needed.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memplan.errors import MemplanError
from memplan.parallel.runtime.processes import FOLLOWED, Exit, run, say


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
      command: program and arguments.
      processes: how many.
      devices: CPU devices of each; None leaves the choice of devices to jax.
      port: of rank 0; None takes a free one.
      timeout_s: how long the processes wait for one another at the start.
      restarts: how often to start again after a failure.
      min_processes: with fewer, down to this many: whoever failed is left out. None keeps the number.
      grace_s: how long the others may take to end after a failure, the second half of it after SIGTERM.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None = None
    port: int | None = None
    timeout_s: float = 60.0
    restarts: int = 0
    min_processes: int | None = None
    grace_s: float = 5.0  # ranks that watch one another end by themselves within about 2 s


def launch(wanted: Launch) -> int:
    """Run to the end, restarts included; the exit code of the first process that failed, 0 where none did.

    Raises:
      MemplanError: before anything is started, where the command, the port or the division of the GPUs cannot be.
    """
    _check(wanted)
    processes = wanted.processes
    failed = _run(wanted, processes, 0)
    for attempt in range(1, wanted.restarts + 1):
        if not failed:
            break
        if wanted.min_processes is not None:
            lost = max(1, sum(one.returncode != FOLLOWED for one in failed))
            processes = max(wanted.min_processes, processes - lost)
        say(f"starting again with {processes} processes, restart {attempt} of {wanted.restarts}")
        failed = _run(wanted, processes, attempt)
    return failed[0].code if failed else 0


def _check(wanted: Launch) -> None:
    if not wanted.command:
        raise MemplanError("There is nothing to start. Write the command after --, as in: -n 4 -- python train.py")
    if shutil.which(wanted.command[0]) is None:
        raise MemplanError(f"There is no program {wanted.command[0]!r} to start. Is it on the PATH and executable?")
    if wanted.min_processes is not None and not 0 < wanted.min_processes <= wanted.processes:
        raise MemplanError(f"--min-processes {wanted.min_processes} is not between 1 and {wanted.processes}.")
    _port(wanted.port)
    _gpus_each(wanted, wanted.processes)


def _port(port: int | None) -> int:
    """This port if it is free, or any free one."""
    try:
        with socket.create_server(("", port or 0)) as door:
            return door.getsockname()[1]
    except OSError as error:
        raise MemplanError(
            f"Port {port} cannot be used: {error.strerror}. Leave out --port to have a free one chosen, or end the "
            "program that has it."
        ) from error


def _gpus_each(wanted: Launch, processes: int) -> int:
    """GPUs for each process; 0 where there are none or CPU devices were asked for."""
    if wanted.devices is not None or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    folder = Path("/proc/driver/nvidia/gpus")
    gpus = (
        len(listed.split(",")) if listed else len(list(folder.iterdir())) if listed is None and folder.is_dir() else 0
    )
    if gpus % processes:
        raise MemplanError(
            f"{gpus} GPUs cannot be divided among {processes} processes. Start a number that divides them, show fewer "
            "with CUDA_VISIBLE_DEVICES, or use CPU devices with --devices."
        )
    return gpus // processes


def _environment(wanted: Launch, processes: int, rank: int, port: int, attempt: int) -> Mapping[str, str]:
    variables = {
        "MEMPLAN_COORDINATOR": f"127.0.0.1:{port}",
        "MEMPLAN_PROCESSES": str(processes),
        "MEMPLAN_PROCESS": str(rank),
        "MEMPLAN_TIMEOUT": f"{wanted.timeout_s:g}",
        "MEMPLAN_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",  # or lines would come late, and those of a killed process never
    }
    if wanted.devices is not None:
        variables |= {"MEMPLAN_DEVICES": str(wanted.devices), "JAX_PLATFORMS": "cpu"}
    if each := _gpus_each(wanted, processes):
        variables["MEMPLAN_LOCAL_DEVICE_IDS"] = ",".join(str(rank * each + number) for number in range(each))
    return {**os.environ, **variables}


def _run(wanted: Launch, processes: int, attempt: int) -> list[Exit]:
    """One attempt. The processes that failed, the first one first; empty where all went well."""
    port = _port(wanted.port)
    environments = [_environment(wanted, processes, rank, port, attempt) for rank in range(processes)]
    return run(wanted.command, environments, wanted.grace_s)
