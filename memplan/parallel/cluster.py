"""Joins this process to the others of its run by `jax.distributed`: the first call of a script, before jax is used.

jax detects Slurm, Open MPI and Kubernetes; `memplan launch` sets the address of rank 0 in the environment. Without any
of these, the process is alone.
"""

import os
from dataclasses import dataclass

import jax

from memplan.errors import MemplanError

# A C++ thread sends jax's heartbeats, also while the process compiles or loads data. With these two values, if rank 1
# of three is killed, stopped or leaves during a step, the others end within 9, 9 and 20 seconds.
HEARTBEAT_S = 10  # without a heartbeat until a process counts as lost; 100 in jax
LEAVING_S = 20  # for which a process waits for the others at its end, until all end with an error; 300 in jax


@dataclass(frozen=True)
class Cluster:
    """A run, as one of its processes sees it."""

    process: int  # rank of this process
    processes: int
    local_devices: int
    devices: int  # of all processes

    def __str__(self) -> str:
        if self.processes == 1:
            return f"one process, {self.devices} device(s)"
        return f"rank {self.process} of {self.processes}, {self.local_devices} of {self.devices} device(s)"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float | None = None,
    leaving_s: float = LEAVING_S,
) -> Cluster:
    """Start `jax.distributed`, or adopt the run if the script has started it.

    If a process dies, stops or leaves while others wait for it, jax ends every other process with an error within 30
    seconds.

    Args:
      coordinator: host:port of rank 0. Default: from `memplan launch`, else what jax detects.
      processes, process: how many there are, and the rank of this one; with `processes=1` it is alone.
      timeout_s: how long to wait for the others at the start. Default: `memplan launch --timeout`, else 60.
      leaving_s: how long a process waits for the others at its end. Raise it if one rank goes on working alone.

    Raises:
      MemplanError: jax was used before, `jax.distributed` runs with another rank, or an argument is missing.
    """
    if jax.distributed.is_initialized():
        found = _cluster()
        if (process, processes) not in ((found.process, found.processes), (None, None)):
            raise MemplanError(
                f"jax.distributed.initialize has made this process rank {found.process} of {found.processes}, not "
                f"{process} of {processes}. Call memplan.parallel.initialize() without arguments after it."
            )
        return found
    _refuse_late()
    environment = os.environ
    if timeout_s is None:
        timeout_s = _number("MEMPLAN_TIMEOUT") if "MEMPLAN_TIMEOUT" in environment else 60
    if (coordinator, processes, process) == (None, None, None) and "MEMPLAN_COORDINATOR" in environment:
        coordinator = environment["MEMPLAN_COORDINATOR"]
        processes, process = _number("MEMPLAN_PROCESSES"), _number("MEMPLAN_PROCESS")
    if "MEMPLAN_DEVICES" in environment:
        jax.config.update("jax_num_cpu_devices", _number("MEMPLAN_DEVICES"))
    if processes == 1:
        return _cluster()
    given = [one is not None for one in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise MemplanError("coordinator, processes and process belong together: give all three, or none of them.")
    if process is not None and processes is not None and not 0 <= process < processes:
        raise MemplanError(f"{process} is no rank of {processes} processes: they are 0 to {processes - 1}.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # its handler keeps SIGTERM from ending the process
    chosen = environment.get("MEMPLAN_LOCAL_DEVICE_IDS")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            local_device_ids=[int(number) for number in chosen.split(",")] if chosen else None,
            cluster_detection_method="deactivate" if all(given) else None,
            initialization_timeout=max(10, round(timeout_s)),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=round(leaving_s),
        )
    except ValueError as error:
        if any(given) or "coordinator_address" not in str(error):  # else jax detects no cluster: this process is alone
            raise MemplanError(f"jax.distributed could not start: {error}") from error
    return _cluster()


def _cluster() -> Cluster:
    return Cluster(jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count())


def _refuse_late() -> None:
    try:  # jax.distributed checks first whether jax was used, then the address
        jax.distributed.initialize(coordinator_address="", cluster_detection_method="deactivate")
    except RuntimeError as error:
        raise MemplanError(
            "jax was used before memplan.parallel.initialize, so its devices are already those of this process alone. "
            "Call it first, before jax.devices(), jax.random.key and the like; imports at the top of a file count."
        ) from error
    except ValueError:
        pass


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError) as error:
        raise MemplanError(
            f"{name} is {os.environ.get(name)!r}, not a number. Let `memplan launch` set all MEMPLAN_ variables."
        ) from error
