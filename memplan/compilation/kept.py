"""Plans and reports in jax's persistent cache, so that a job's next start compiles nothing.

jax stores the executable under a key of its module, its options and the machine. The module's name
contains a digest of everything else that the plan depends on. memplan stores a second entry with
the plan and the report. If jax has dropped the executable, or never stored it because it compiled
too quickly, memplan compiles again by the stored plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from memplan import io
from memplan.program import compat

_FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """An entry of the cache."""

    name: str  # the name under which the module was compiled
    hides_latency: bool  # scheduled by XLA's latency-hiding scheduler
    plan: str | None  # the plan's JSON; None for the unmodified step
    report: str  # the report's JSON


def digest(*facts: object) -> str:
    """A digest of these facts, memplan's code, and the versions of jax and jaxlib."""
    versions = [io.version_of(name) for name in ("jax", "jaxlib")]
    return hashlib.sha256(json.dumps([_code(), *versions, *map(str, facts)]).encode()).hexdigest()[
        :32
    ]


@functools.cache
def _code() -> str:
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest()


def find(key: str) -> Kept | None:
    """The entry of a key; None if there is none. Warns if the entry is damaged."""
    cache = compat.disk_cache()
    content = cache.get(_name(key)) if cache else None
    if content is None:
        return None
    try:
        return io.decode(Kept, io.parse_json(io.text_of(content), _FORMAT), complete=True)
    except ValueError as error:
        warnings.warn(
            f"the entry {_name(key)} of jax's compilation cache is damaged ({error}); the step is "
            "planned again. "
            "Delete the entry to have it kept again.",
            stacklevel=2,
        )
        return None


def keep(key: str, kept: Kept, seconds: float) -> None:
    """Store the entry if it took at least jax's minimum compile time."""
    cache = compat.disk_cache()
    if cache and seconds >= compat.least_seconds_to_cache():
        cache.put(_name(key), json.dumps({"format": _FORMAT, **io.encode(kept)}).encode())


def _name(key: str) -> str:
    return f"memplan-{key}"
