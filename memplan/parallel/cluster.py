"""Join this process to the others of its run: the first call of a training script, before jax is used.

`jax.distributed` does the work. Slurm, Open MPI and Kubernetes are detected by jax itself; `memplan launch` says in the
environment where rank 0 is; without any of these the process is alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from memplan.errors import MemplanError

# jax's heartbeats come from a C++ thread, so a process that compiles or loads data still sends them. With these two, of
# three processes whose rank 1 is killed, stopped or leaves during a step, the others end within 9, 9 and 20 seconds.
HEARTBEAT_S = 10  # without a heartbeat before a process counts as lost; jax's default is 100
LEAVING_S = 20  # that a process waits for the others at its end before all of them end with an error; 300 in jax


@dataclass(frozen=True)
class Cluster:
    """What a process knows of its run."""

    process: int  # the rank of this process
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
    """Start `jax.distributed`, or adopt it where the script has started it.

    A process that dies, stops or leaves while others wait for it ends the run: jax stops every other process with an
    error within 30 seconds.

    Args:
      coordinator: host:port of rank 0. Default: what `memplan launch` says, else what jax detects.
      processes, process: how many there are, and the rank of this one; `processes=1` is alone.
      timeout_s: how long to wait for the others; 60, or what `memplan launch --timeout` says.
      leaving_s: how long a process waits at its end for the others. Raise it where one rank works on alone.

    Raises:
      MemplanError: jax was used before, `jax.distributed` runs with another rank, or an argument is missing.
    """
    if jax.distributed.is_initialized():
        return _adopt(processes, process)
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
        if any(given) or "coordinator_address" not in str(error):
            raise MemplanError(f"jax.distributed could not start: {error}") from error
        return _cluster()  # jax detects no cluster here
    return _cluster()


def _cluster() -> Cluster:
    return Cluster(jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count())


def _adopt(processes: int | None, process: int | None) -> Cluster:
    found = _cluster()
    if (process, processes) not in ((found.process, found.processes), (None, None)):
        raise MemplanError(
            f"jax.distributed.initialize has made this process rank {found.process} of {found.processes}, not "
            f"{process} of {processes}. Call memplan.parallel.initialize() without arguments after it."
        )
    return found


def _refuse_late() -> None:
    """`jax.distributed` checks whether jax was used before it looks at the address."""
    try:
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
