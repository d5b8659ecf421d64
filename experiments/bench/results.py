"""Results of cases: one schema for every question, one JSON file each under results/QUESTION/."""

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
_DECIDING = (  # Packages that determine what is compiled.
    "jax", "jaxlib", "flax", "equinox", "jmp", "jraph", "optax", "jax-cuda12-plugin", "libtpu",
    "nvidia-cuda-nvcc-cu12",
)  # fmt: skip

Row = Mapping[str, Any]
"""Figures by name; a name ends in its unit. None: not measured."""


@dataclass(frozen=True)
class Measurement:
    """The result of a measure on a case."""

    rows: Sequence[Row]
    # For one step under one budget: "fits", "untouched" (the plain step fits) or "does not fit".
    status: str = "measured"
    reason: str = ""  # why it does not fit


@dataclass(frozen=True)
class Result:
    """A measurement, and the code, packages and hardware it was made with."""

    question: str
    case: str
    source: str  # of memplan and the models, see `source_here`
    versions: Mapping[str, str]  # of Python and the packages that determine what is compiled
    hardware: str
    status: str  # as in `Measurement`, or "failed"
    reason: str = ""  # why it failed or does not fit
    rows: Sequence[Row] = field(default_factory=tuple)

    @property
    def path(self) -> Path:
        return RESULTS / self.question / f"{self.case}.json"

    def keep(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, self.to_json(indent=1) + "\n")

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent, allow_nan=False)

    def is_of_today(self, sources: tuple[str, ...]) -> bool:
        """Whether it was measured with today's sources and the installed packages."""
        decided = {name: release for name, release in self.versions.items() if name in _DECIDING}
        return self.source == source_here(sources) and decided == _packages()


def measured_here(
    question: str, case: str, measurement: Measurement, sources: tuple[str, ...]
) -> Result:
    """The result of a measurement in this process."""
    by = source_here(sources), {"python": platform.python_version(), **_packages()}, hardware()
    return Result(
        question, case, *by, measurement.status, measurement.reason, tuple(measurement.rows)
    )


def stored_result(question: str, case: str) -> Result | None:
    path = RESULTS / question / f"{case}.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


@cache
def source_here(sources: tuple[str, ...] = SOURCES) -> str:
    """A digest of the files that a result depends on; patterns are relative to the repository."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in sources for path in ROOT.glob(pattern)):
        digest.update(
            path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:12]


def _packages() -> dict[str, str]:
    """Versions of the packages in `_DECIDING` that are installed."""
    versions = {}
    for name in _DECIDING:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def hardware() -> str:
    cpu = Path("/proc/cpuinfo")
    models = (
        [line for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{os.cpu_count()} cores {model}"
