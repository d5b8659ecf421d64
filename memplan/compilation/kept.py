"""What a step was planned to, kept in jax's persistent compilation cache, so that the next start compiles nothing.

jax keeps the executable under a key of its module, its options and the machine; the module's name carries what else the
plan depends on. An entry beside it has the plan and the report. Where jax has forgotten the executable, or never kept
it because it compiled too quickly, the plan is still followed.
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
    """An entry.

    Attributes:
      name: under which the module was compiled.
      hides_latency: the module was scheduled to hide the latency of copies.
      plan, report: their JSON; no plan of a step that went through as it is.
    """

    name: str
    hides_latency: bool
    plan: str | None
    report: str


def digest(*facts: object) -> str:
    """A digest of facts, of memplan's code and of the versions of jax."""
    versions = [io.version_of(name) for name in ("jax", "jaxlib")]
    return hashlib.sha256(json.dumps([_code(), *versions, *map(str, facts)]).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def find(key: str) -> Kept | None:
    """The entry of a key; None if there is none, with a warning if it is damaged."""
    cache = compat.disk_cache()
    written = cache.get(_name(key)) if cache else None
    if written is None:
        return None
    try:
        return io.decode(Kept, io.parse_json(io.text_of(written), _FORMAT), complete=True)
    except ValueError as error:
        warnings.warn(
            f"the entry {_name(key)} of jax's compilation cache is damaged ({error}); the step is planned again. "
            "Delete the entry to have it kept again.",
            stacklevel=2,
        )
        return None


def keep(key: str, kept: Kept, seconds: float) -> None:
    """Keep an entry that took so many seconds to make, if jax keeps what takes so long."""
    cache = compat.disk_cache()
    if cache and seconds >= compat.least_seconds_to_cache():
        cache.put(_name(key), json.dumps({"format": _FORMAT, **io.encode(kept)}).encode())


def _name(key: str) -> str:
    return f"memplan-{key}"
