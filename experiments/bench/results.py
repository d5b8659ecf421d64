"""What was measured of a case: one schema for every question, a JSON file each under results/QUESTION/."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memplan.io import write_atomic

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SOURCES = ("memplan/**/*.py", "models/**/*.py")
_DECIDING = (  # of what is compiled
    "jax", "jaxlib", "flax", "equinox", "jmp", "jraph", "optax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip

Row = Mapping[str, Any]
"""Figures by name; names end in their unit. None is what was not found out."""


@dataclass(frozen=True)
class Found:
    """What a measure makes of a case."""

    rows: Sequence[Row]
    status: str = "measured"  # of one step under one budget "fits", "untouched" (as it is), or "does not fit"
    reason: str = ""  # for what does not fit


@dataclass(frozen=True)
class Result:
    """What was found, and by what."""

    question: str
    case: str
    source: str  # of memplan and the models, see `source_here`
    versions: Mapping[str, str]  # of Python and of the packages that decide what is compiled
    hardware: str
    status: str  # as `Found` has it, or "failed"
    reason: str = ""  # for the last, and for what does not fit
    rows: Sequence[Row] = field(default_factory=tuple)

    @property
    def path(self) -> Path:
        return RESULTS / self.question / f"{self.case}.json"

    def keep(self) -> None:
        """The file is written whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, self.to_json(indent=1) + "\n")

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent, allow_nan=False)

    def is_of_today(self, sources: tuple[str, ...]) -> bool:
        """Measured on these sources, with the packages that are installed."""
        decided = {name: found for name, found in self.versions.items() if name in _DECIDING}
        return self.source == source_here(sources) and decided == _packages()


def made_here(question: str, case: str, found: Found, sources: tuple[str, ...]) -> Result:
    """A result of this process."""
    by = source_here(sources), {"python": platform.python_version(), **_packages()}, hardware()
    return Result(question, case, *by, found.status, found.reason, tuple(found.rows))


def known(question: str, case: str) -> Result | None:
    path = RESULTS / question / f"{case}.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


@cache
def source_here(sources: tuple[str, ...] = SOURCES) -> str:
    """A digest of the files that decide what a result says; patterns go from the root of the project."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in sources for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _packages() -> dict[str, str]:
    """Those that are not installed are left out."""
    found = {}
    for name in _DECIDING:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hardware() -> str:
    cpu = Path("/proc/cpuinfo")
    models = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{os.cpu_count()} cores {model}"
