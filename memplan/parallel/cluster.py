"""Joins this process to the others of its run by `jax.distributed`.

`initialize` is the first call of a script, before jax is used. jax detects Slurm, Open MPI and
Kubernetes; `memplan launch` puts the address of rank 0 into the environment. Without any of these,
the process is alone.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from memplan.errors import MemplanError

# A C++ thread sends jax's heartbeats, also while the process compiles or loads data. With these two
# values, if rank 1 of three is killed, stops or leaves during a step, the others end within 9, 9
# and 20 seconds.
HEARTBEAT_S = 10  # A process without a heartbeat for so long is lost; 100 in jax.
LEAVING_S = 20  # At its end, a process waits so long for the others before all fail; 300 in jax.


@dataclass(frozen=True)
class Cluster:
    """A run, as one of its processes sees it.

    Example:
      >>> from memplan import parallel
      >>> print(parallel.Cluster(process=1, processes=2, local_devices=4, devices=8))
      rank 1 of 2, 4 of 8 device(s)
    """

    process: int  # rank of this process
    processes: int
    local_devices: int
    devices: int  # of all processes

    def __str__(self) -> str:
        if self.processes == 1:
            return f"one process, {self.devices} device(s)"
        devices = f"{self.local_devices} of {self.devices} device(s)"
        return f"rank {self.process} of {self.processes}, {devices}"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float | None = None,
    leaving_s: float = LEAVING_S,
) -> Cluster:
    """Start `jax.distributed`, or adopt the run if the script has started it.

    If a process dies, stops or leaves while others wait for it, jax ends every other process with
    an error within 30 seconds.

    Args:
      coordinator: host:port of rank 0. Default: from `memplan launch`, else what jax detects.
      processes, process: their number, and the rank of this one; with `processes=1` it is alone.
      timeout_s: how long to wait for the others at the start. Default: `memplan launch --timeout`,
        else 60.
      leaving_s: how long a process waits for the others at its end. Raise it if one rank goes on
        working alone.

    Raises:
      MemplanError: jax was used before, `jax.distributed` runs with another rank, or an argument is
        missing.

    Example:
      >>> from memplan import parallel
      >>> print(parallel.initialize(processes=1))  # before jax is used
      one process, 1 device(s)
    """
    if jax.distributed.is_initialized():
        cluster = _cluster()
        if (process, processes) not in ((cluster.process, cluster.processes), (None, None)):
            raise MemplanError(
                f"jax.distributed.initialize has made this process rank {cluster.process} of "
                f"{cluster.processes}, not {process} of {processes}. Call "
                "memplan.parallel.initialize() without arguments after it."
            )
        return cluster
    _refuse_late()
    environment = os.environ
    if timeout_s is None:
        timeout_s = _number("MEMPLAN_TIMEOUT") if "MEMPLAN_TIMEOUT" in environment else 60
    arguments = (coordinator, processes, process)
    if arguments == (None, None, None) and "MEMPLAN_COORDINATOR" in environment:
        coordinator = environment["MEMPLAN_COORDINATOR"]
        processes = _number("MEMPLAN_PROCESSES")
        process = _number("MEMPLAN_PROCESS")
    if "MEMPLAN_DEVICES" in environment:
        jax.config.update("jax_num_cpu_devices", _number("MEMPLAN_DEVICES"))
    if processes == 1:
        return _cluster()
    are_set = {argument is not None for argument in (coordinator, processes, process)}
    if len(are_set) > 1:
        raise MemplanError(
            "coordinator, processes and process belong together: give all three, or none of them."
        )
    if process is not None and processes is not None and not 0 <= process < processes:
        raise MemplanError(
            f"{process} is no rank of {processes} processes: they are 0 to {processes - 1}."
        )
    _start(coordinator, processes, process, timeout_s, leaving_s)
    return _cluster()


def variables_of_processes(
    processes: int,
    devices: int | None,
    port: int,
    timeout_s: int,
) -> Sequence[Mapping[str, str]]:
    """For each rank of a run on this machine, the variables that `initialize` reads.

    Args:
      devices: CPU devices of each process. If None, the processes share out the GPUs, if any.

    Raises:
      MemplanError: the GPUs cannot be divided.
    """
    shared = {
        "PYTHONUNBUFFERED": "1",  # else a killed process loses its last lines
        "MEMPLAN_COORDINATOR": f"127.0.0.1:{port}",
        "MEMPLAN_PROCESSES": str(processes),
        "MEMPLAN_TIMEOUT": str(timeout_s),
    }
    if devices is not None:
        shared |= {"MEMPLAN_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    variables = [{**shared, "MEMPLAN_PROCESS": str(rank)} for rank in range(processes)]
    if devices is not None or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return variables
    installed = ",".join(str(path) for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", installed)
    gpus = len(visible.split(",")) if visible else 0
    if gpus % processes:
        raise MemplanError(
            f"{gpus} GPUs cannot be divided among {processes} processes. Start a number that "
            "divides them, show fewer with CUDA_VISIBLE_DEVICES, or use CPU devices with --devices."
        )
    share = gpus // processes
    if share:
        for rank in range(processes):
            numbers = range(rank * share, (rank + 1) * share)
            variables[rank]["MEMPLAN_LOCAL_DEVICE_IDS"] = ",".join(map(str, numbers))
    return variables


def _start(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    timeout_s: float,
    leaving_s: float,
) -> None:
    """Start `jax.distributed`, unless there are no arguments and jax detects no cluster."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler would keep SIGTERM from ending the process.
    jax.config.update("jax_enable_preemption_service", False)
    device_ids = [*filter(None, os.environ.get("MEMPLAN_LOCAL_DEVICE_IDS", "").split(","))]
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            local_device_ids=[*map(int, device_ids)] or None,
            cluster_detection_method=None if coordinator is None else "deactivate",
            initialization_timeout=max(10, round(timeout_s)),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=round(leaving_s),
        )
    except ValueError as error:
        # Without arguments, this error says that jax detects no cluster: the process is alone.
        if coordinator is not None or "coordinator_address" not in str(error):
            raise MemplanError(f"jax.distributed could not start: {error}") from error


def _cluster() -> Cluster:
    return Cluster(
        process=jax.process_index(),
        processes=jax.process_count(),
        local_devices=jax.local_device_count(),
        devices=jax.device_count(),
    )


def _refuse_late() -> None:
    try:  # jax.distributed checks first whether jax was used, then the address
        jax.distributed.initialize(coordinator_address="", cluster_detection_method="deactivate")
    except RuntimeError as error:
        raise MemplanError(
            "jax was used before memplan.parallel.initialize, so its devices are already those of "
            "this process alone. Call it first, before jax.devices(), jax.random.key and the like; "
            "imports at the top of a file count."
        ) from error
    except ValueError:
        pass


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError) as error:
        raise MemplanError(
            f"{name} is {os.environ.get(name)!r}, not a number. Let `memplan launch` set all "
            "MEMPLAN_ variables."
        ) from error
