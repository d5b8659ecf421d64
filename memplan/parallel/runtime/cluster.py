"""Join this process to the others of its run: the first call of a training script, before jax is used.

Who starts the processes does not matter: `memplan launch` and a start by hand say where rank 0 is; Slurm, Open MPI and
Kubernetes are found by jax.distributed itself; without any of these the process is alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import jax

from memplan.errors import MemplanError
from memplan.parallel.runtime import rendezvous
from memplan.parallel.runtime.messages import Line
from memplan.parallel.runtime.roster import Member
from memplan.parallel.runtime.watch import Watch
from memplan.program import compat

ALONE, BY_HAND, LAUNCHED, DETECTED = "alone", "by hand", "memplan launch", "found by jax.distributed"


@dataclass(frozen=True)
class Cluster:
    """What a process knows of its run.

    Attributes:
      process: its rank, of `processes`.
      local_devices, devices: how many it holds itself, and all together.
      coordinator: host:port where jax.distributed meets; '' alone or where jax found it by itself.
      how: ALONE, BY_HAND, LAUNCHED or DETECTED.
      members: all processes with host and pid.
    """

    process: int
    processes: int
    local_devices: int
    devices: int
    coordinator: str
    how: str
    members: Mapping[int, Member] = field(repr=False, compare=False)
    watch: Watch | None = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.how == ALONE:
            return f"one process, {self.devices} device(s): nothing to join"
        return f"rank {self.process} of {self.processes}, {self.local_devices} of {self.devices} device(s) ({self.how})"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float | None = None,
    silence_s: float = 60.0,
) -> Cluster:
    """Meet the other processes, start jax.distributed, and from then on end with a message when one of them dies.

    Args:
      coordinator: host:port of rank 0; by default what `memplan launch` says, else what jax.distributed finds.
      processes, process: how many there are and which one this is; `processes=1` is alone whatever the surroundings.
      timeout_s: how long to wait for the others; 60, or what `memplan launch --timeout` says.
      silence_s: a process that sends nothing for this long (stopped, or its network is down) counts as lost. One
        that dies is noticed at once.

    Raises:
      MemplanError: jax was used before; the coordinator cannot be reached or its port is taken; a process did not come;
        two have the same rank. In time: within `timeout_s` of the process that says so.
    """
    _refuse_late()
    environment = os.environ
    how = BY_HAND
    if coordinator is None and processes is None and process is None and "MEMPLAN_COORDINATOR" in environment:
        how, coordinator = LAUNCHED, environment["MEMPLAN_COORDINATOR"]
        processes, process = _number("MEMPLAN_PROCESSES"), _number("MEMPLAN_PROCESS")
    if "MEMPLAN_DEVICES" in environment:
        jax.config.update("jax_num_cpu_devices", _number("MEMPLAN_DEVICES"))
    if timeout_s is None:
        timeout_s = float(environment.get("MEMPLAN_TIMEOUT", "60"))
    if processes == 1:
        return _alone()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # its handler keeps SIGTERM from ending the process
    if coordinator is None and processes is None and process is None:
        return _detected(timeout_s, silence_s)
    if coordinator is None or processes is None or process is None:
        raise MemplanError("coordinator, processes and process belong together: give all three, or none of them.")
    return _met(coordinator, processes, process, how, timeout_s, silence_s)


def _refuse_late() -> None:
    """jax.distributed looks for a used jax before anything else, and asks for an address after that."""
    if jax.distributed.is_initialized():
        raise MemplanError("This process has joined a run already: call memplan.parallel.initialize once.")
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


def _alone() -> Cluster:
    me = _me(0)
    return Cluster(0, 1, jax.local_device_count(), jax.device_count(), "", ALONE, {0: me}, None)


def _me(process: int) -> Member:
    return Member(process, socket.gethostname(), os.getpid())


def _met(coordinator: str, processes: int, process: int, how: str, timeout_s: float, silence_s: float) -> Cluster:
    if not 0 <= process < processes:
        raise MemplanError(f"{process} is no rank of {processes} processes: they are 0 to {processes - 1}.")
    me = _me(process)
    watch = _watch(coordinator, me, processes, timeout_s, silence_s)
    host, port = rendezvous.split(coordinator)
    bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    chosen = os.environ.get("MEMPLAN_LOCAL_DEVICE_IDS")
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        local_device_ids=[int(number) for number in chosen.split(",")] if chosen else None,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, round(timeout_s)),
        coordinator_bind_address=bind if rendezvous.is_loopback(host) else None,
    )
    return _joined(watch, coordinator, how)


def _detected(timeout_s: float, silence_s: float) -> Cluster:
    """jax finds its coordinator and tells nobody, so the watch meets at a port of rank 0 that jax's store passes on."""
    try:
        jax.distributed.initialize(initialization_timeout=max(10, round(timeout_s)))
    except ValueError as error:
        if "coordinator_address" in str(error):  # jax knows none of the surroundings
            return _alone()
        raise MemplanError(f"jax.distributed could not read what started this process: {error}") from error
    process, processes = jax.process_index(), jax.process_count()
    if processes == 1:
        return _joined(None, "", DETECTED)
    store = compat.coordination_client()
    if process == 0:
        with contextlib.closing(socket.create_server(("", 0))) as free:
            store.key_value_set("memplan/watch", f"{socket.gethostname()}:{free.getsockname()[1]}")
    address = store.blocking_key_value_get("memplan/watch", round(timeout_s * 1000))
    return _joined(_watch(address, _me(process), processes, timeout_s, silence_s), "", DETECTED)


def _watch(address: str, me: Member, processes: int, timeout_s: float, silence_s: float) -> Watch:
    lines: dict[int, Line]
    if me.process == 0:
        lines, members = rendezvous.gather(address, me, processes, timeout_s)
    else:
        line, members = rendezvous.join(address, me, processes, timeout_s)
        lines = {0: line}
    watch = Watch(me, members, lines, silence_s)
    watch.start()
    atexit.register(watch.finish)
    _tell_of_failures(watch)
    return watch


def _joined(watch: Watch | None, coordinator: str, how: str) -> Cluster:
    members = {0: _me(0)} if watch is None else watch.members
    counts = jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()
    return Cluster(*counts, coordinator, how, members, watch)


def _tell_of_failures(watch: Watch) -> None:
    """An error that nobody catches ends the process at once: at its exit jax would wait minutes for the others."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        usual(kind, error, trace)
        first = (str(error).splitlines() or [""])[0][:300]
        watch.fail(f"{kind.__name__}: {first}")

    sys.excepthook = hook
