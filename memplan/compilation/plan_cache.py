"""Plans on disk: the second start of a training script finds the plan of the first.

One file each, named by everything that a plan depends on; written atomically, so processes may share the folder. A
damaged file is ignored and replaced. The oldest files are deleted if there are too many.
"""

import contextlib
import functools
import hashlib
import json
import os
import warnings
from pathlib import Path

from memplan import io
from memplan.errors import PlanMismatchError
from memplan.io import write_atomic
from memplan.planning.plan import Plan

MOST = 256  # plans of some 100 kB

_OFF = ("", "0", "off")


def folder() -> Path | None:
    """The folder of plans: the environment variable MEMPLAN_CACHE, else the user's cache; None if that is `off`."""
    named = os.environ.get("MEMPLAN_CACHE")
    if named is not None:
        return None if named.lower() in _OFF else Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan" / "plans"


def key(*parts: object) -> str:
    """A file name for a plan that depends on these facts, the installed planner, and the version of jax."""
    versions = [io.version_of(name) for name in ("jax", "jaxlib")]
    return hashlib.sha256(json.dumps([_planner(), *versions, *map(str, parts)]).encode()).hexdigest()


@functools.cache
def _planner() -> str:
    """Digest of the planner's code and of the code that reads modules."""
    digest = hashlib.sha256()
    for room in ("hardware", "compilation", "planning", "xla"):
        for path in sorted((Path(__file__).parents[1] / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def find(name: str) -> Plan | None:
    """The plan with this name. Warns of a damaged one, and ignores it."""
    kept = folder()
    if kept is None:
        return None
    path = kept / f"{name}.json"
    try:
        plan = Plan.load(path)
        os.utime(path)
    except OSError:
        return None
    except PlanMismatchError as error:
        warnings.warn(f"a plan in the cache is damaged and will be made again: {error}", stacklevel=2)
        return None
    return plan


def keep(name: str, plan: Plan) -> None:
    """Store a plan; does nothing if the folder is not writable."""
    kept = folder()
    if kept is None:
        return
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
        write_atomic(kept / f"{name}.json", plan.to_json())
        for path in sorted(kept.glob("*.json"), key=_age)[:-MOST]:
            path.unlink(missing_ok=True)  # another process may have deleted it first


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
