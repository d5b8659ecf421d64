"""How does a step scale? Simulated from what XLA compiles for a whole machine that is not here (extra gpu-aot).

python -m experiments.scaling.run [--only NAME ...]    # writes results/*.json
python -m experiments.scaling.run --table              # rewrites the tables of README.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.readme import measure_and_tell
from memplan.hardware.overheads import NONE, Overheads
from memplan.report.scaling import Point, Scaling
from memplan.studies.scaling import CompiledStep, compile_step
from models.train import Built, resnet_step, unet3d_step

HERE = Path(__file__).parent

DDL_SHARE = 0.476
"""Speed of DDL's P100s over the roofline's: 90 epochs of 1,281,167 images in 50 minutes on 256 of them at 95 %
(arXiv:1708.02188) are 158 images/s on one, 202.5 ms for 32; the roofline of ResNet-50's step is 96.4 ms. That includes
their input and their launches."""


@dataclass(frozen=True)
class Program:
    """A step with one device's batch, the machine, and a budget for each device."""

    step: Callable[[], Built]
    topology: str
    device: str
    budget: str | None = None
    statistics: str = "global"


PROGRAMS = {
    "resnet-ddl": Program(lambda: resnet_step(batch=32), "ddl", "p100", None, "device"),
    "resnet101-ddl": Program(lambda: resnet_step(batch=20, depth=101, classes=21841), "ddl", "p100", None, "device"),
    "unet-ddl-planned": Program(lambda: unet3d_step(96), "ddl", "p100", "1100MiB"),
    "resnet-ddl-planned": Program(lambda: resnet_step(batch=32), "ddl", "p100", "1536MiB", "device"),
    "resnet-ddl-global": Program(lambda: resnet_step(batch=32), "ddl", "p100"),
    "resnet-today": Program(lambda: resnet_step(batch=128), "today", "h200", None, "device"),
}

USUAL = Overheads()
ASSUMED = {"": USUAL, "-ideal": NONE, "-ddl_speed": replace(USUAL, roofline_share=DDL_SHARE)}
"""Name's ending -> overheads: the defaults, none at all, and kernels as slow as DDL's."""

AT_DDL_SPEED = ("resnet-ddl", "resnet101-ddl")

CASES = {
    f"{name}{ending}": (name, overheads)
    for name in PROGRAMS
    for ending, overheads in ASSUMED.items()
    if ending != "-ddl_speed" or name in AT_DDL_SPEED
}

PUBLISHED = {
    "resnet-ddl": ("ResNet-50, ImageNet-1k, 32 images each", 0.95),
    "resnet101-ddl": ("ResNet-101, ImageNet-22k, 20 images each", 0.88),
}
"""At 64 hosts of 4 P100: DDL's own figures."""


def measure(case: str) -> str:
    name, overheads = CASES[case]
    return _compiled(name).scaling(overheads).to_json()


@functools.lru_cache(maxsize=1)
def _compiled(name: str) -> CompiledStep:
    program = PROGRAMS[name]
    function, args = program.step()
    limits = {"budget": program.budget, "statistics": program.statistics}
    return compile_step(function, args, program.topology, program.device, donate_argnums=0, **limits)


def table() -> str:
    found = {case: _read(case) for case in CASES if _path(case).exists()}
    versions = {name: version for one in found.values() for name, version in one.versions}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*_published(found), "", *_scaled(found), "", told])


def _published(found: dict[str, Scaling]) -> Iterator[str]:
    yield "| at 64 x 4 P100 | published by DDL | ideal | default overheads | and kernels at DDL's speed |"
    yield "|---|---|---|---|---|"
    for name, (what, published) in PUBLISHED.items():
        simulated = " | ".join(_efficiency(found, f"{name}{ending}", 256) for ending in ("-ideal", "", "-ddl_speed"))
        yield f"| {what} | {published:.0%} | {simulated} |"


def _scaled(found: dict[str, Scaling]) -> Iterator[str]:
    yield (
        "| case | statistics of the batch | compiled for | device MiB | planner | one device ms | devices | step ms "
        "| collectives ms | hidden | slowest | efficiency | ideal |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for case in found:
        name, overheads = CASES[case]
        if overheads is not NONE:
            yield from _rows(case, PROGRAMS[name], found[case], found, f"{name}-ideal")


def _rows(case: str, program: Program, one: Scaling, found: dict[str, Scaling], ideal: str) -> Iterator[str]:
    first = f"{case} | {program.statistics} | {one.compiled_shape} | {one.device_bytes / 2**20:.0f}"
    whole = f"| {first} | {one.planner} | {1e3 * one.single_s:.1f}"
    for point in one.points:
        if point.devices in (16, 256, 4096):
            yield f"{whole} | {_figures(point)} | {_efficiency(found, ideal, point.devices)} |"
            whole = "| | | | | | "


def _figures(point: Point) -> str:
    hidden = point.hidden_collective_s / point.collective_s if point.collective_s else 1.0
    times = f"{point.devices} | {1e3 * point.step_s:.1f} | {1e3 * point.collective_s:.1f} | {hidden:.0%}"
    return f"{times} | {point.slowest - 1:+.1%} | {point.efficiency:.1%}"


def _efficiency(found: dict[str, Scaling], case: str, devices: int) -> str:
    points = found[case].points if case in found else ()
    return next((f"{point.efficiency:.1%}" for point in points if point.devices == devices), "")


def _path(case: str) -> Path:
    return HERE / "results" / f"{case}.json"


def _read(case: str) -> Scaling:
    return Scaling.from_json(_path(case).read_text())


if __name__ == "__main__":
    measure_and_tell(__doc__, CASES, measure, HERE / "README.md", table)
