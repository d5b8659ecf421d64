"""Kernels and copies of one step in jax's profiler, and how much of them overlaps.

CUPTI's events are in the lines `Stream #...` of the planes `/device:GPU:...`. Copies are named
`MemcpyD2H` and `MemcpyH2D` and have their size in `memcpy_details`; kernels have the instruction
that launched them in `hlo_op`.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

Span = tuple[float, float]

_SIZE = re.compile(r"\bsize:(\d+)")
_NO_KERNELS = ("MemcpyD2H", "MemcpyH2D", "MemcpyH2H", "Memset")


@dataclass(frozen=True)
class Event:
    """A kernel or a copy."""

    name: str
    op: str  # the HLO instruction; "" if unknown, as in a CUDA graph
    span: Span  # start and end, in seconds
    nbytes: int  # of a copy


def traced(run: Callable[..., Any], *args: Any) -> list[Event]:
    """Events of one call; none if the profiler sees no GPU, for example without CUPTI."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*args))
        return [
            event
            for path in Path(folder).rglob("*.xplane.pb")
            for event in events(ProfileData.from_file(str(path)))
        ]


def events(profile: Any) -> list[Event]:
    """The GPU's events in a profile."""
    lines = (
        line
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
    )
    return [
        _event(event) for line in lines if line.name.startswith("Stream") for event in line.events
    ]


def _event(event: Any) -> Event:
    with warnings.catch_warnings():
        # jax's type that iterates over stats warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        stats = dict(event.stats)
    size = _SIZE.search(str(stats.get("memcpy_details", "")))
    span = 1e-9 * event.start_ns, 1e-9 * (event.start_ns + event.duration_ns)
    return Event(event.name, str(stats.get("hlo_op", "")), span, int(size[1]) if size else 0)


def copies(events: Sequence[Event], direction: str) -> list[Event]:
    """Copies in a direction: `D2H` or `H2D`."""
    return [event for event in events if event.name.startswith(f"Memcpy{direction}")]


def kernels(events: Sequence[Event]) -> list[Event]:
    """Kernels, and copies within the device."""
    return [event for event in events if not event.name.startswith(_NO_KERNELS)]


def overlap(spans: Sequence[Span], covers: Sequence[Span]) -> float:
    """Length of the part of `spans` that `covers` cover, by inclusion and exclusion."""
    return length(spans) + length(covers) - length([*spans, *covers])


def length(spans: Sequence[Span]) -> float:
    """Length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
