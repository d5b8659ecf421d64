"""What was measured of one step under one budget, wherever the step comes from, and the files that keep it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from memplan.io import write_atomic

ROOT = Path(__file__).parents[2]
FITS = ("fits", "untouched")
SOURCES = ("memplan/**/*.py", "models/**/*.py")
_DECIDING = (  # of what is compiled
    "jax", "jaxlib", "flax", "equinox", "jmp", "jraph", "optax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A step under a budget; None is what was not found out.

    Attributes:
      name: of the step, the device and the budget; names a file, too.
      status: "fits", "untouched" where the step fits as it is, "does not fit", or "failed".
      reason: of the last two.
      plain_bytes: device bytes of the unmodified step, by the compiler; `plain_step_s` by the replay of its schedule.
      plain_compile_s, plain_compile_cpu_s: of `jax.jit(step).lower(*args).compile()`, by the clock and of all threads.
      predicted_bytes: device bytes of the plan that was compiled last.
      compiled_bytes, host_bytes: of the same, by the compiler.
      step_s: of the planned step, by the same replay.
      bound_s: no plan within the budget takes less.
      floor_bytes: no plan takes less.
      compilations: of the planned step.
      again, offloaded_bytes: kernels that run once more, and bytes that go to the host.
      planning_s: of the last plan alone.
      ready_s, ready_cpu_s: of everything before the planned step could run, likewise.
      version: of memplan's source and of what compiles, see `version_here`.
      environment: versions and the machine.
    """

    name: str
    device: str
    version: str
    status: str
    budget_bytes: int | None = None
    reason: str = ""
    plain_bytes: int | None = None
    plain_step_s: float | None = None
    plain_compile_s: float | None = None
    plain_compile_cpu_s: float | None = None
    predicted_bytes: int | None = None
    compiled_bytes: int | None = None
    host_bytes: int | None = None
    step_s: float | None = None
    bound_s: float | None = None
    floor_bytes: int | None = None
    compilations: int | None = None
    again: int | None = None
    offloaded_bytes: int | None = None
    planning_s: float | None = None
    ready_s: float | None = None
    ready_cpu_s: float | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.status in FITS

    @property
    def missed(self) -> float | None:
        """What the prediction is off by, as a share of the compiler's bytes; None where nothing was planned."""
        if self.predicted_bytes is None or not self.compiled_bytes or self.status == "untouched":
            return None
        return self.predicted_bytes / self.compiled_bytes - 1

    @property
    def slower(self) -> float | None:
        """Share of a plain step's time that the plan adds."""
        if self.step_s is None or not self.plain_step_s or not self.fits:
            return None
        return self.step_s / self.plain_step_s - 1

    @property
    def cost(self) -> float | None:
        """How many plain compilations it takes until the step could run."""
        if self.ready_s is None or not self.plain_compile_s:
            return None
        return self.ready_s / self.plain_compile_s

    @property
    def cpu_cost(self) -> float | None:
        """The same in seconds of all threads, which a busy machine does not stretch."""
        if self.ready_cpu_s is None or not self.plain_compile_cpu_s:
            return None
        return self.ready_cpu_s / self.plain_compile_cpu_s


@dataclass(frozen=True)
class Rows:
    """Rows in a folder, one JSON file each, written whole or not at all."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def find(self, name: str) -> Row | None:
        path = self.path(name)
        return Row(**json.loads(path.read_text())) if path.exists() else None

    def keep(self, row: Row) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(row.name), json.dumps(asdict(row), indent=1, allow_nan=False) + "\n")

    def all(self, names: Iterable[str]) -> list[Row]:
        """Those of `names` that are there, in their order."""
        return [row for name in names if (row := self.find(name)) is not None]


def former(path: Path) -> dict[str, Row]:
    """Rows of an earlier version, all in one file, by name."""
    return {row["name"]: Row(**row) for row in json.loads(path.read_text())} if path.exists() else {}


@cache
def version_here(sources: tuple[str, ...] = SOURCES) -> str:
    """Of everything that decides what a row says: the source of memplan and of the step, jax, and the compilers.

    Args:
      sources: patterns of files, from the root of the project.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in sources for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{digest.hexdigest()[:12]} on {' '.join(f'{name} {found}' for name, found in versions_here().items())}"


def versions_here() -> dict[str, str]:
    """Of the packages that decide; those that are not installed are left out."""
    found = {}
    for name in _DECIDING:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """Versions and the machine, for those who read a result."""
    cpu = Path("/proc/cpuinfo")
    models = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    return {"python": platform.python_version(), **versions_here(), "cpu": f"{os.cpu_count()} cores {model}"}


def summary(rows: Iterable[Row], before: Mapping[str, Row], half: Iterable[str]) -> list[str]:
    """Is the prediction true, what does a plan cost the step, and what does making it cost: one line each.

    Args:
      before: rows of the former version, by name; without any they are not spoken of.
      half: names of the rows at half of the plain step's bytes.
    """
    rows, half = list(rows), set(half)
    planned = [row for row in rows if row.status != "untouched"]
    fitting = [row for row in rows if row.fits]
    first = sum(row.fits and row.compilations == 1 for row in planned)
    off = _spread((None if row.missed is None else abs(row.missed) for row in planned), "{:.2%}")
    slower = _spread((row.slower for row in fitting if row.name in half), "{:.1%}")
    clock, threads = _spread(row.cost for row in rows), _spread(row.cpu_cost for row in rows)
    return [
        f"fits: {len(fitting)} of {len(rows)}{_named(row.name for row in rows if not row.fits)}",
        f"truth: the prediction is off by {off}; right at the first compilation: {first} of {len(planned)}",
        f"time over plain at 50 %: {slower}",
        f"cost in plain compilations: by the clock {clock}; in seconds of all threads {threads}",
        f"compilations: {_spread(row.compilations for row in planned)}",
        *([f"slower than before by more than 1 %: {_compared(rows, before)}"] if before else []),
    ]


def _compared(rows: Iterable[Row], before: Mapping[str, Row]) -> str:
    """How many rows lose against the former ones, and which."""
    known = [
        (row.name, row.step_s / one.step_s - 1)
        for row in rows
        if row.fits and row.step_s and (one := before.get(row.name)) and one.step_s
    ]
    worse = [f"{name} {more:+.1%}" for name, more in known if more > 0.01]
    return f"{len(worse)} of {len(known)}{_named(worse)}"


def _named(names: Iterable[str]) -> str:
    told = ", ".join(names)
    return f" ({told})" if told else ""


def _spread(numbers: Iterable[float | None], shown: str = "{:.1f}") -> str:
    """Median, 90th percentile and the largest of those that are known."""
    ordered = sorted(number for number in numbers if number is not None)
    if not ordered:
        return "not measured"
    nine_tenths = ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
    middle, high, worst = (shown.format(one) for one in (median(ordered), nine_tenths, ordered[-1]))
    return f"median {middle}, 90th percentile {high}, worst {worst}"
