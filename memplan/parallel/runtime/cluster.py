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
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax

from memplan.errors import MemplanError
from memplan.parallel.runtime import rendezvous
from memplan.parallel.runtime.heartbeats import Member
from memplan.parallel.runtime.main_thread import MainThreadObserver
from memplan.parallel.runtime.messages import Connection
from memplan.parallel.runtime.monitor import EXIT_CODE, Monitor
from memplan.parallel.runtime.submissions import Submissions
from memplan.program import compat

ALONE, BY_HAND, LAUNCHED, DETECTED = "alone", "by hand", "memplan launch", "found by jax.distributed"
JOINED = "joined jax.distributed"
SILENCE_S = 60.0  # a process that loads with the interpreter's lock held sends nothing meanwhile
# At its end a process waits in jax for all others, and jax ends every one of them when that takes longer. Rank 0 may go
# on for hours with an evaluation of its own; a death meanwhile is known by the monitor.
LEAVING_S = 86_400
ASK_S = 2.0  # per look for rank 0's address

submissions = Submissions()  # from before the ranks have met
_starting = threading.Lock()
_monitor: Monitor | None = None
_join_thread: threading.Thread | None = None


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
    monitor: Monitor | None = field(repr=False, compare=False)

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
    silence_s: float = SILENCE_S,
) -> Cluster:
    """Meet the other processes, start jax.distributed, and from then on end with a message when one of them dies.

    The run also ends, with exit code 75 and the name of the rank, when one leaves while others wait for it, or gives a
    `data_parallel` step other values, code or rows than the others do. Where jax.distributed.initialize was called
    before, the processes exist and merely join one another here. A second call is an error, as jax's own is.

    Args:
      coordinator: host:port of rank 0; by default what `memplan launch` says, else what jax.distributed finds.
      processes, process: how many there are and which one this is; `processes=1` is alone whatever the surroundings.
      timeout_s: how long to wait for the others; 60, or what `memplan launch --timeout` says.
      silence_s: a process that sends nothing for this long (its host or its network is down) counts as lost. One
        that dies is noticed at once, one that is stopped, on rank 0's host, after 5 s.

    Raises:
      MemplanError: jax was used before; the coordinator cannot be reached or its port is taken; a process did not come;
        two have the same rank. In time: within `timeout_s` of the process that says so.
    """
    environment = os.environ
    if timeout_s is None:
        timeout_s = float(environment.get("MEMPLAN_TIMEOUT", "60"))
    if jax.distributed.is_initialized():
        return _join_initialized(processes, process, timeout_s, silence_s)
    _refuse_late()
    how = BY_HAND
    if coordinator is None and processes is None and process is None and "MEMPLAN_COORDINATOR" in environment:
        how, coordinator = LAUNCHED, environment["MEMPLAN_COORDINATOR"]
        processes, process = _number("MEMPLAN_PROCESSES"), _number("MEMPLAN_PROCESS")
    if "MEMPLAN_DEVICES" in environment:
        jax.config.update("jax_num_cpu_devices", _number("MEMPLAN_DEVICES"))
    if processes == 1:
        return _alone()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # its handler keeps SIGTERM from ending the process
    if coordinator is None and processes is None and process is None:
        return _detect(timeout_s, silence_s)
    if coordinator is None or processes is None or process is None:
        raise MemplanError("coordinator, processes and process belong together: give all three, or none of them.")
    return _meet(coordinator, processes, process, how, timeout_s, silence_s)


def _refuse_late() -> None:
    """jax.distributed looks for a used jax before anything else, and asks for an address after that."""
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


def _meet(coordinator: str, processes: int, process: int, how: str, timeout_s: float, silence_s: float) -> Cluster:
    if not 0 <= process < processes:
        raise MemplanError(f"{process} is no rank of {processes} processes: they are 0 to {processes - 1}.")
    me = _me(process)
    monitor = _start_monitor(coordinator, me, processes, timeout_s, silence_s)
    host, port = rendezvous.parse_address(coordinator)
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
        shutdown_timeout_seconds=LEAVING_S,
    )
    return _cluster(monitor, coordinator, how)


def _detect(timeout_s: float, silence_s: float) -> Cluster:
    """jax finds its coordinator and tells nobody, so all meet at a port of rank 0 that jax's store passes on."""
    patience_s = max(10, round(timeout_s))
    try:
        jax.distributed.initialize(initialization_timeout=patience_s, shutdown_timeout_seconds=LEAVING_S)
    except ValueError as error:
        if "coordinator_address" in str(error):  # jax knows none of the surroundings
            return _alone()
        raise MemplanError(f"jax.distributed could not read what started this process: {error}") from error
    return _cluster(_meet_by_store(timeout_s, silence_s), "", DETECTED)


def _join_initialized(processes: int | None, process: int | None, timeout_s: float, silence_s: float) -> Cluster:
    """jax.distributed runs already: the script called it, or memplan did."""
    if is_joined():
        raise MemplanError("This process has joined a run already: call memplan.parallel.initialize once.")
    here = jax.process_index(), jax.process_count()
    if (process, processes) not in (here, (None, None)):
        raise MemplanError(
            f"jax.distributed.initialize has made this process rank {here[0]} of {here[1]}, not {process} of "
            f"{processes}. Call memplan.parallel.initialize() without arguments after it, or instead of it."
        )
    if _join_thread is None:
        return _cluster(_meet_by_store(timeout_s, silence_s), "", JOINED)
    _join_thread.join(timeout_s)
    if _monitor is None:
        raise MemplanError(f"Not all processes called memplan.parallel.initialize within {timeout_s:g} s.")
    return _cluster(_monitor, "", JOINED)


def is_joined() -> bool:
    """True where all processes called `initialize`."""
    return _monitor is not None and _join_thread is None


def join_in_background() -> None:
    """For a run that uses a mesh of many processes and has not called `initialize`; the others may come much later."""
    global _join_thread
    with _starting:
        if _monitor is not None or _join_thread is not None:
            return
        if compat.coordination_client() is None:  # processes that jax.distributed did not start
            submissions.disable()
            return
        _join_thread = threading.Thread(target=_join, name="memplan joining", daemon=True)
        _join_thread.start()


def _join() -> None:
    try:
        _meet_by_store(LEAVING_S, SILENCE_S)
    except jax.errors.JaxRuntimeError:
        submissions.disable()  # jax's store is gone: the run ends
    except MemplanError as error:
        os.write(2, f"memplan: {error}\nmemplan: this process therefore ends with exit code {EXIT_CODE}.\n".encode())
        os._exit(EXIT_CODE)


def _meet_by_store(timeout_s: float, silence_s: float) -> Monitor | None:
    """jax tells nobody where its coordinator is, so all meet at a port of rank 0 that jax's store passes on."""
    me, processes, store = _me(jax.process_index()), jax.process_count(), compat.coordination_client()
    if processes == 1:
        return None
    if me.process == 0:
        with contextlib.closing(socket.create_server(("", 0))) as free:
            store.key_value_set("memplan/watch", f"{socket.gethostname()}:{free.getsockname()[1]}")
    return _start_monitor(_address_of_rank_0(store, timeout_s), me, processes, timeout_s, silence_s)


def _address_of_rank_0(store: Any, timeout_s: float) -> str:
    """Where rank 0 can be met."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return store.blocking_key_value_get("memplan/watch", round(1000 * min(ASK_S, timeout_s)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > end:
                raise MemplanError(
                    f"Rank 0 did not call memplan.parallel.initialize within {timeout_s:g} s."
                ) from error


def _start_monitor(address: str, me: Member, processes: int, timeout_s: float, silence_s: float) -> Monitor:
    global _monitor
    connections: dict[int, Connection]
    if me.process == 0:
        connections, members = rendezvous.meet(address, me, processes, timeout_s)
    else:
        connection, members = rendezvous.join(address, me, processes, timeout_s)
        connections = {0: connection}
    _monitor = monitor = Monitor(me, members, connections, silence_s, submissions, MainThreadObserver())
    monitor.start()
    atexit.register(monitor.finish)  # runs before jax's own end, where processes wait for one another: jax is imported
    _report_failures(monitor)
    return monitor


def _cluster(monitor: Monitor | None, coordinator: str, how: str) -> Cluster:
    members = {0: _me(0)} if monitor is None else monitor.members
    counts = jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()
    return Cluster(*counts, coordinator, how, members, monitor)


def _report_failures(monitor: Monitor) -> None:
    """An error that nobody catches ends the process at once: at its exit jax would wait minutes for the others."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        usual(kind, error, trace)
        first = (str(error).splitlines() or [""])[0][:300]
        monitor.fail(f"{kind.__name__}: {first}")

    sys.excepthook = hook
