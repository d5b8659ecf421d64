"""XLA calls back after scheduling; a caller that registered a module by name may replace it.

The hook belongs to the platform and sees every compilation of the process; of other modules it reads only the name. It
raises nothing into XLA: it keeps an error and leaves the module unchanged, and `Interception.check` raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from memplan.program import compat
from memplan.xla.async_pairs import expand_async_pairs
from memplan.xla.large_literals import put_back, set_aside

Rewrite = Callable[[str], str | None]  # text of the scheduled module -> its replacement, or None

_lock = threading.Lock()
_awaited: dict[str, Interception] = {}
_platforms: set[str] = set()


@dataclass
class Interception:
    """A module that a caller waits for."""

    rewrite: Rewrite
    called: bool = False  # the compiler has called back
    error: Exception | None = None  # the error of the callback

    def check(self) -> None:
        """Raise the error of the callback, if any."""
        if self.error is not None:
            raise self.error


@contextmanager
def intercept(name: str, rewrite: Rewrite, platform: str) -> Iterator[Interception]:
    """During this context, `rewrite` receives the scheduled module with that name; platform: "cpu" or "cuda"."""
    interception = Interception(rewrite)
    with _lock:
        if platform not in _platforms:
            compat.register_after_scheduling(_after_scheduling, platform)
            _platforms.add(platform)
        if name in _awaited:
            raise RuntimeError(f"{name} is already being compiled")
        _awaited[name] = interception
    try:
        yield interception
    finally:
        with _lock:
            del _awaited[name]


def _after_scheduling(proto: bytes) -> bytes | None:
    interception = _awaited.get(module_name(proto))
    if interception is None:
        return None
    interception.called = True
    try:
        small, literals = set_aside(proto)
        text = interception.rewrite(compat.module_text(small))
        return None if text is None else put_back(compat.module_proto(expand_async_pairs(text)), literals)
    except Exception as error:
        interception.error = error
        return None


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
