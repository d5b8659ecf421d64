"""How does a step scale? Simulated from what XLA compiles for a whole machine that is not here (extra gpu-aot).

python -m experiments.scaling.run [--only NAME ...]    # writes results/*.json
python -m experiments.scaling.run --table              # rewrites the table of README.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.readme import measure_and_tell
from memplan.report.scaling import Scaling
from memplan.scaling import simulate
from models.train import Built, resnet_step, unet3d_step

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A step with one device's batch, the machine, and a budget for each device."""

    step: Callable[[], Built]
    topology: str
    device: str
    budget: str | None
    statistics: str = "global"


CASES = {
    "resnet-ddl": Case(lambda: resnet_step(batch=32), "ddl", "p100", None, "device"),
    "unet-ddl-planned": Case(lambda: unet3d_step(96), "ddl", "p100", "1100MiB"),
    "resnet-ddl-planned": Case(lambda: resnet_step(batch=32), "ddl", "p100", "1536MiB", "device"),
    "resnet-ddl-global": Case(lambda: resnet_step(batch=32), "ddl", "p100", None),
    "resnet-today": Case(lambda: resnet_step(batch=128), "today", "h200", None, "device"),
}


def measure(name: str) -> str:
    case = CASES[name]
    function, args = case.step()
    limits = {"budget": case.budget, "statistics": case.statistics, "donate_argnums": 0}
    return simulate(function, args, case.topology, case.device, **limits).to_json()


def table() -> str:
    lines = [
        "| case | statistics of the batch | compiled for | device MiB | planner | one device ms | devices | step ms "
        "| collectives hidden | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    versions: dict[str, str] = {}
    for name, case in CASES.items():
        path = HERE / "results" / f"{name}.json"
        if not path.exists():
            continue
        found = Scaling.from_json(path.read_text())
        versions |= dict(found.versions)
        first = f"{name} | {case.statistics} | {found.compiled_shape} | {found.device_bytes / 2**20:.0f}"
        whole = f"| {first} | {found.planner} | {1e3 * found.single_s:.1f}"
        for one in found.points:
            if one.devices in (16, 256, 4096):
                hidden = one.hidden_collective_s / one.collective_s if one.collective_s else 1.0
                figures = f"{one.devices} | {1e3 * one.step_s:.1f} | {hidden:.0%} | {one.efficiency:.1%}"
                lines.append(f"{whole} | {figures} |")
                whole = "| | | | | | "
    return "\n".join([*lines, "", ", ".join(f"{name} {version}" for name, version in versions.items())])


if __name__ == "__main__":
    measure_and_tell(__doc__, CASES, measure, HERE / "README.md", table)
