"""XLA calls back before and after scheduling; a caller that registered a module by name may replace
it.

The hook belongs to the platform and sees every compilation of the process; of other modules it
reads only the name. It raises nothing into XLA: it keeps an error and leaves the module unchanged,
and `Interception.check` raises. A callback that raises `Stopped` ends the compilation before XLA
generates code: on the CPU after a tenth of its seconds, for a GPU after a fifth to two thirds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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


@dataclass
class Interception:
    """A module that a caller waits for."""

    shape: Rewrite | None  # of the module before it is scheduled
    rewrite: Rewrite  # of the scheduled module
    called: bool = False  # the compiler has called back with the scheduled module
    error: Exception | None = None  # the first error of a callback

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
    interception = Interception(shape, rewrite)
    with _lock:
        if platform not in _platforms:
            for scheduled in (False, True):
                compat.register_hook(partial(_called_back, scheduled), platform, scheduled)
            _platforms.add(platform)
        while name in _awaited:  # another thread compiles the same
            _lock.wait()
        _awaited[name] = interception
    try:
        yield interception
    finally:
        with _lock:
            del _awaited[name]
            _lock.notify_all()


def _called_back(scheduled: bool, proto: bytes) -> bytes | None:
    interception = _awaited.get(module_name(proto))
    if interception is None:
        return None
    rewrite = interception.rewrite if scheduled else interception.shape
    interception.called |= scheduled
    if rewrite is None or interception.error is not None:
        return None
    try:
        module = rewrite(Module.read(proto, scheduled))
        return None if module is None else serialize(module)
    except Exception as error:
        interception.error = error
        return _NO_MODULE if isinstance(error, Stopped) else None


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
