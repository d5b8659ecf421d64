"""XLA calls back before and after scheduling; a caller that registered a module by name may replace
it.

The hook belongs to the platform and sees every compilation of the process; of other modules it
reads only the name. It raises nothing into XLA, which would abort the process: it keeps an error
and leaves the module unchanged, and `Interception.check` raises. A callback that raises `Stopped`
ends the compilation before XLA generates code: on the CPU after a tenth of its seconds, for a GPU
after a fifth to two thirds. So does Ctrl-C.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from memplan.program import compat
from memplan.xla.module import Module
from memplan.xla.serialize import serialize

Rewrite = Callable[[Module], Module | None]
"""A module -> its replacement, or None; it may raise `Stopped`."""
# Bytes that are no module. XLA ends the compilation when it gets them: it fails to parse them.
_NO_MODULE = b"no module"

_lock = threading.Condition()
_awaited: dict[str, Interception] = {}
_platforms: set[str] = set()


class Stopped(Exception):
    """A callback ends the compilation: it has read all that its caller wants to know."""


ENDS = Stopped, KeyboardInterrupt
"""What ends a compilation if a callback raises it."""


@dataclass
class _CtrlC:
    """The handler of Ctrl-C during a compilation; it calls the user's where that may raise.

    Python calls a handler wherever its main thread runs next. While XLA compiles, that is the first
    instruction of `_called_back`, before any `try`.
    """

    users: Callable[[int, FrameType | None], Any]
    may_raise: bool = False
    is_pending: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_pending = not self.may_raise
        if self.may_raise:
            self.may_raise = False  # the error is handled
            self.users(number, frame)
            self.may_raise = True

    def deliver(self) -> None:
        """Call the user's handler if Ctrl-C was pressed."""
        if self.is_pending:
            self.is_pending = False
            self.users(signal.SIGINT, None)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, Ctrl-C raises, also if it was pressed before."""
        try:
            self.may_raise = True
            self.deliver()
            yield
        finally:
            self.may_raise = False


@dataclass
class Interception:
    """A module that a caller waits for."""

    shape: Rewrite | None  # of the module before it is scheduled
    rewrite: Rewrite  # of the scheduled module
    ctrl_c: _CtrlC
    called: bool = False  # the compiler has called back with the scheduled module
    error: BaseException | None = None  # the first error of a callback

    def check(self) -> None:
        """Raise the error of the callback, if any."""
        if self.error is not None:
            raise self.error


@contextmanager
def intercept(
    name: str, rewrite: Rewrite, platform: str, shape: Rewrite | None = None
) -> Iterator[Interception]:
    """During this context, `rewrite` receives the scheduled module with that name; platform: "cpu"
    or "cuda".

    Args:
      shape: receives it before, when XLA has partitioned but not scheduled it.
    """
    with _lock:
        if platform not in _platforms:
            for scheduled in (False, True):
                compat.register_hook(partial(_called_back, scheduled), platform, scheduled)
            _platforms.add(platform)
        while name in _awaited:  # another thread compiles the same
            _lock.wait()
        users = signal.getsignal(signal.SIGINT)
        ctrl_c = _CtrlC(users if callable(users) else _ignore)
        interception = _awaited[name] = Interception(shape, rewrite, ctrl_c)
    try:
        with _handling(ctrl_c):
            yield interception
    finally:
        with _lock:
            del _awaited[name]
            _lock.notify_all()


@contextmanager
def _handling(ctrl_c: _CtrlC) -> Iterator[None]:
    """Inside, `ctrl_c` handles Ctrl-C, at the end what was pressed and has not raised.

    Only in the main thread, the one that Python calls handlers in.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or ctrl_c.users is _ignore:
        yield
        return
    signal.signal(signal.SIGINT, ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, ctrl_c.users)
        ctrl_c.deliver()


def _ignore(number: int, frame: FrameType | None) -> None:
    """In place of a handler that is not Python's."""


def _called_back(scheduled: bool, proto: bytes) -> bytes | None:
    interception = _awaited.get(module_name(proto))
    if interception is None:
        return None
    rewrite = interception.rewrite if scheduled else interception.shape
    interception.called |= scheduled
    if rewrite is None or interception.error is not None:
        return None
    try:
        with interception.ctrl_c.raising():
            module = rewrite(Module.read(proto, scheduled))
            return None if module is None else serialize(module)
    except BaseException as error:
        interception.error = error
        return _NO_MODULE if isinstance(error, ENDS) else None


def module_name(proto: bytes) -> str:
    """The name in a serialized HloModuleProto, its first field; "" if another field comes first."""
    if not proto.startswith(b"\x0a"):
        return ""
    length = 0
    for at, byte in enumerate(proto[1:6]):
        length |= (byte & 0x7F) << (7 * at)
        if not byte & 0x80:
            return proto[at + 2 : at + 2 + length].decode()
    return ""
