"""A step that does not get its memory: what it needs and what there is, what became of its arguments, what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from memplan.errors import OutOfMemoryError
from memplan.units import show_bytes
from memplan.xla import local

_ASKED = re.compile(r"allocate ([\d.]+) ?([KMGT]i)?(?:B|bytes)")
_PINNED_POOL = "xla_gpu_host_bfc"
_UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def no_block(needed_bytes: int, room: local.Room) -> OutOfMemoryError:
    """The error before a step that cannot get its temporaries, which are one block."""
    return OutOfMemoryError(
        f"the step was not started, and its arguments are as they were: its temporaries are one block of "
        f"{show_bytes(needed_bytes)}, and {_there(room)}. Try:\n  " + "\n  ".join(_advice()),
        needed_bytes=needed_bytes,
        free_bytes=room.block_bytes,
    )


def out_of_memory(error: Exception, donated: Sequence[Any]) -> OutOfMemoryError | None:
    """XLA's error in memplan's words; None where it is about something else.

    Args:
      donated: arguments that the step was given for good.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    asked = _ASKED.search(text)
    needed = int(float(asked[1]) * _UNITS[asked[2]]) if asked else None
    what = f"a block of {show_bytes(needed)}" if needed else "the memory that it needs"
    lost = sum(leaf.is_deleted() for leaf in donated)
    state = (
        f"{lost} of its {len(donated)} donated arguments are lost with it: go on from a checkpoint"
        if lost
        else "its arguments are as they were"
    )
    if _PINNED_POOL in text:
        limit = local.pools().host_limit_bytes
        enough = 1 + max(limit, needed or 0) // 2**30
        return OutOfMemoryError(
            f"the step failed: it did not get {what} of pinned host memory. XLA's pinned pool ends at "
            f"{show_bytes(limit)} per GPU, in regions that no block spans two of; {state}. Try:\n  "
            f"before Python starts, {local.export(local.HOST_LIMIT, str(enough))} or more\n  a lower host_budget",
            needed_bytes=needed,
        )
    room = local.room()
    there = _there(room) if room else text.partition(": ")[2].partition("\n")[0].partition(" [")[0]
    return OutOfMemoryError(
        f"the step failed: it did not get {what} on the device, and {there}; {state}. Try:\n  "
        + "\n  ".join(_advice()),
        needed_bytes=needed,
        free_bytes=room.block_bytes if room else None,
    )


def _there(room: local.Room) -> str:
    return (
        f"the largest that the device's pool can give is {show_bytes(room.block_bytes)}: "
        f"{show_bytes(room.in_use_bytes)} of {show_bytes(room.limit_bytes)} are in use"
    )


def _advice() -> Iterator[str]:
    yield "free what the step does not need: drop arrays, or array.delete()"
    yield "put the state and the batch on the device before anything else: an array between free parts keeps them apart"
    if not local.pools().preallocates:
        yield (
            f"before Python starts: {local.export(local.PREALLOCATE, 'true')}. The pool is then one region; now it is "
            "several, and no block spans two"
        )
    yield "a lower budget: the temporaries are then less"
