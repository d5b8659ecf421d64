"""The processes of one run on this machine: started, their output passed on, watched, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

FOLLOWED = 75  # exit code of a process that ended because another failed (memplan.parallel.runtime.monitor.EXIT_CODE)
POLL_S = 0.05
SETTLE_S = 0.3  # failures this close together are one: whoever did not merely follow is the first
# Linux ends the process (9) when the launcher, its parent, ends in whatever way (PR_SET_PDEATHSIG is 1). Set by a few
# lines that then become the command: code between fork and exec is not safe in a process with threads.
TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])"""


@dataclass(frozen=True)
class Exit:
    """How a process ended; `returncode` as Popen gives it."""

    rank: int
    pid: int
    returncode: int

    @property
    def code(self) -> int:
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal.Signals(-self.returncode).name}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.returncode}"


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]], grace_s: float) -> list[Exit]:
    """One process per environment. Those that failed, the first one first; empty where all went well.

    After a failure the others may report and end by themselves. SIGTERM comes after half of `grace_s`, SIGKILL at its
    end.
    """
    started: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    try:
        with _stoppable():
            for environment in environments:
                started.append(_start(command, environment))
            for rank, process in enumerate(started):
                readers += _pass_on(rank, process)
            return _wait(started, grace_s)
    except _Stopped as stopped:
        say(f"stopped by {signal.Signals(stopped.number).name}: ending all processes")
        _end_all(started, grace_s)
        raise SystemExit(128 + stopped.number) from None
    finally:
        for process in started:  # a rank's own children may outlive it
            _signal(process, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(1.0)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a group of its own, so that its children can be ended with it and Ctrl-C reaches the launcher alone."""
    tied = [sys.executable, "-SEc", TIED, str(os.getpid())] if sys.platform == "linux" else []
    return subprocess.Popen(
        [*tied, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _pass_on(rank: int, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [
        threading.Thread(target=_copy, args=(source, getattr(target, "buffer", None), rank), daemon=True)
        for source, target in pairs
    ]
    for thread in threads:
        thread.start()
    return threads


def _copy(source: BinaryIO, target: BinaryIO | None, rank: int) -> None:
    prefix = f"[{rank}] ".encode()
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # nobody reads any more: the process must not wait for that
                if target is not None:
                    target.write(prefix + line.rstrip(b"\n") + b"\n")
                    target.flush()


def _wait(started: Sequence[subprocess.Popen[bytes]], grace_s: float) -> list[Exit]:
    while not (failed := _failed(started)):
        if all(process.returncode == 0 for process in started):
            return []
        time.sleep(POLL_S)
    time.sleep(SETTLE_S)
    failed = sorted(_failed(started), key=lambda ended: (ended.returncode == FOLLOWED, ended not in failed))
    say(str(failed[0]))
    _end_all(started, grace_s, wait_first=True)
    known = {ended.rank for ended in failed}
    others = [ended for ended in _failed(started) if ended.rank not in known]
    for ended in [*failed[1:], *others]:
        say(f"afterwards {ended}")
    return failed


def _failed(started: Sequence[subprocess.Popen[bytes]]) -> list[Exit]:
    exits = [Exit(rank, process.pid, process.poll() or 0) for rank, process in enumerate(started)]
    return [one for one in exits if one.returncode]


def _end_all(started: Sequence[subprocess.Popen[bytes]], grace_s: float, *, wait_first: bool = False) -> None:
    if wait_first:
        grace_s /= 2
        _await_all(started, grace_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [(rank, process) for rank, process in enumerate(started) if process.poll() is None]
        for rank, process in running:
            say(f"rank {rank} (pid {process.pid}) still runs: {number.name}")
            _signal(process, number)
        _await_all(started, grace_s)


def _await_all(started: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        time.sleep(POLL_S)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Stopped(BaseException):
    def __init__(self, number: int):
        self.number = number


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the launcher in good order."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    sys.stderr.write(f"memplan launch: {text}\n")
    sys.stderr.flush()
