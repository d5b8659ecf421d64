"""What the main thread waits for: is it jax, for processes that have left?

On a CPU a jitted function waits for the others inside its own call, in C++, where no frame of Python's shows it; what
is called, and with which arrays, is read from the instruction at which the caller's frame stands.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import jax

from memplan.program import compat

IDLE_S = 2.0  # how far back the processor's time counts
IDLE_SHARE = 0.2  # of one core: gloo waits with 1 %, what computes takes a core
MAKING = ("CALL", "BINARY_SUBSCR", "BINARY_OP")  # what makes a function that has no name
MISSING = object()


class MainThreadObserver:
    """Looked at several times a second, by another thread, once somebody has left."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None  # held, so that no other frame can pass for it
        self._at = -1
        self._since_s = 0.0
        self._spent: deque[tuple[float, float]] = deque()

    def sample(self, now_s: float) -> float:
        """Seconds for which the main thread has been seen at the same place."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = -1 if frame is None else frame.f_lasti
        if frame is not self._frame or at != self._at:
            self._frame, self._at, self._since_s = frame, at, now_s
        self._spent.append((now_s, time.process_time()))
        while len(self._spent) > 2 and now_s - self._spent[1][0] >= IDLE_S:
            self._spent.popleft()
        return now_s - self._since_s

    def where(self) -> str:
        """`file:line` of the innermost frame that is neither jax's nor memplan's."""
        frame = self._frame
        while frame is not None and _package(frame) in ("jax", "jaxlib", "memplan") and frame.f_back is not None:
            frame = frame.f_back
        if frame is None:
            return "an unknown line"
        return compat.relative(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def waits_for_thread(self) -> bool:
        """Waits for another thread of this process."""
        return self._frame is not None and _package(self._frame) in ("threading", "queue", "concurrent")

    def waits_for(self, left: Collection[int]) -> bool | None:
        """For processes among these; None where that cannot be known."""
        frame = self._frame
        if frame is None:
            return False
        if _is_jax(frame):
            inside = list(_arrays([list(one.f_locals.values()) for one in _jax_frames(frame)]))
            spread = any(_is_spread(array, left) for array in inside)
            if spread:
                return _module(frame) in compat.BLOCKING_MODULES or self._idle()
            return False if inside else self._unknown()
        called, operands = _call(frame)
        if called is MISSING:
            return self._unknown()
        if not (hasattr(called, "lower") and hasattr(called, "trace")):  # what jax.jit returns
            return compat.is_coordination_client(called)  # a barrier of jax.distributed
        found = list(_arrays(operands))
        if not self._idle():
            return False
        return any(_is_spread(array, left) for array in found) if found else None

    def _unknown(self) -> bool | None:
        return None if self._idle() else False

    def _idle(self) -> bool:
        (begin_s, before_s), (end_s, after_s) = self._spent[0], self._spent[-1]
        return end_s - begin_s >= IDLE_S and after_s - before_s < IDLE_SHARE * (end_s - begin_s)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).split(".")[0]


def _is_jax(frame: FrameType) -> bool:
    return _package(frame) in ("jax", "jaxlib")


def _jax_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and _is_jax(frame):
        yield frame
        frame = frame.f_back


def _arrays(values: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array) and hasattr(leaf, "sharding")]


def _is_spread(array: jax.Array, left: Collection[int]) -> bool:
    return any(device.process_index in left for device in getattr(array.sharding, "device_set", ()))


def _call(frame: FrameType) -> tuple[Any, list[Any]]:
    """What is being called where the frame stands, and what stands by name among its operands.

    The call's instruction has the place of the whole expression in the source; what is called begins where that does.
    A method's is the object that it belongs to, where that is no function of Python's.
    """
    code = list(dis.get_instructions(frame.f_code))
    here = next((one for one in code if one.offset == frame.f_lasti), None)
    if here is None or here.positions is None or not here.opname.startswith("CALL"):
        return MISSING, []
    whole = here.positions
    if any(_begins(one, whole) and one is not here and one.opname in MAKING and _within(one, whole) for one in code):
        return MISSING, []
    before = [one for one in code if one.offset < here.offset and one.opname.startswith("LOAD_")]
    inside = [one for one in before if _within(one, whole)]
    first = next((number for number, one in enumerate(inside) if not _begins(one, whole)), len(inside))
    called: Any = MISSING
    for one in inside[:first]:
        called = _loaded(frame, one.argval, called, is_attribute=one.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    operands = [_named(frame, name) for one in inside[first:] for name in _names(one.argval)]
    return called, operands


def _within(one: dis.Instruction, whole: Any) -> bool:
    at = one.positions
    if at is None or None in at or None in whole or tuple(at) == tuple(whole):
        return False
    begin, end = (whole.lineno, whole.col_offset), (whole.end_lineno, whole.end_col_offset)
    return begin <= (at.lineno, at.col_offset) and (at.end_lineno, at.end_col_offset) <= end


def _begins(one: dis.Instruction, whole: Any) -> bool:
    at = one.positions
    return at is not None and (at.lineno, at.col_offset) == (whole.lineno, whole.col_offset)


def _loaded(frame: FrameType, name: Any, before: Any, *, is_attribute: bool) -> Any:
    """Nothing of the user's is run for it: no property, no `__getattr__`."""
    if not is_attribute:
        return _named(frame, name)
    found = inspect.getattr_static(before, name, MISSING) if before is not MISSING else MISSING
    is_method = not inspect.isfunction(found) and not hasattr(found, "lower") and not inspect.ismodule(before)
    return before if is_method and found is not MISSING and callable(found) else found


def _named(frame: FrameType, name: Any) -> Any:
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if isinstance(name, str) and name in names:
            return names[name]
    return MISSING


def _names(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) else (argval,)  # one instruction may load two
