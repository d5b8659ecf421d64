"""Measured over modelled seconds, by class of kernel, of the modules whose kernels a card has timed.

python -m experiments.gpu.classes [--folder FOLDER] [--device NAME] [--rows NAME...] [--table]

The folder has pairs of files (`experiments.gpu.kernels`). The model is that of every plan
(`memplan.xla.replay`), for the described device. `--table` writes the README's table of whole steps
instead: measured and modelled seconds, and those of a roofline. Needs no GPU.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.readme import grid, inserted
from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.hardware.efficiency import PEAK
from memplan.hardware.roofline import dispatch_seconds
from memplan.io import write_atomic
from memplan.units import format_seconds
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.replay import replay

_HERE = Path(__file__).parent
_FOLDER = _HERE / "results" / "kernels" / "nvidia-h200"
_STEPS = "kernels-of-"  # Rows of training steps.
_CALLS = "calls-"  # Rows of small calls, which measure the host.
_CONVOLUTIONS = (
    ("__cudnn$convBackwardFilter", "filter gradient"),
    ("__cudnn$convBackwardInput", "input gradient"),
    ("__cudnn$conv", "convolution"),
)


@dataclass(frozen=True)
class ClassSeconds:
    """The kernels of one class in one run of a step."""

    row: str
    name: str  # of the class; "all" for the whole row
    kernels: int  # that run
    measured_s: float
    modelled_s: float

    @property
    def ratio(self) -> float:
        return self.modelled_s / self.measured_s


def class_seconds(folder: Path, row: str, device: Device) -> list[ClassSeconds]:
    """The classes of a row, the one with most measured seconds first, then the whole row."""
    facts, module = _read(folder, row)
    measured = facts["seconds"]
    modelled = replay(module, device).seconds
    sums = defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
    for body, op, runs in _instructions(module, module.entry, 1):
        if op.name in measured and op.name in modelled:
            for name in (_class_of(module, body, op), "all"):
                sums[name][0] += runs
                sums[name][1] += measured[op.name][0]
                sums[name][2] += runs * modelled[op.name]
    classes = [ClassSeconds(row, name, int(count), *s) for name, (count, *s) in sums.items()]
    return sorted(classes, key=lambda each: (each.name == "all", -each.measured_s))


def _read(folder: Path, row: str) -> tuple[dict[str, Any], Module]:
    """What was measured of a row, and the module that ran."""
    measured = json.loads((folder / f"{row}.json").read_text())
    return measured, Module.read(gzip.decompress((folder / f"{row}.hlo.gz").read_bytes()))


def _instructions(
    module: Module, body: Computation, runs: int
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield instructions outside of fusions, each with its computation and how often it runs."""
    for op in body.ops.values():
        if op.opcode == "while":
            yield from _instructions(module, module[op.body], runs * op.trips)
        elif op.opcode in ("call", "conditional"):
            for called in op.called:
                yield from _instructions(module, module[called], runs)
        else:
            yield body, op, runs


def _class_of(module: Module, body: Computation, op: Instruction) -> str:
    for target, name in _CONVOLUTIONS:
        if op.target.startswith(target):
            return name
    return "product" if matrix_flops(module, body, op) else op.opcode


def rows_of(folder: Path, names: Sequence[str] = ("",)) -> list[str]:
    """Rows of a folder whose names begin so, without those of small calls."""
    rows = sorted(path.name.removesuffix(".hlo.gz") for path in folder.glob("*.hlo.gz"))
    return [row for row in rows if row.startswith(tuple(names)) and not row.startswith(_CALLS)]


@dataclass(frozen=True)
class StepSeconds:
    """A step that a card has run, and what is predicted of the module that it ran."""

    row: str
    measured_s: float  # by the clock
    kernels_s: float  # measured
    roofline_s: float  # predicted at the peak rates
    modelled_s: float  # predicted as plans count
    dispatch_s: float  # predicted, of the host for the arrays

    @property
    def cells(self) -> Sequence[str]:
        predicted_s = self.modelled_s + self.dispatch_s
        seconds = self.measured_s, self.roofline_s, self.modelled_s, self.dispatch_s
        ratios = (
            self.roofline_s / self.kernels_s,
            self.modelled_s / self.kernels_s,
            predicted_s / self.measured_s,
        )
        return [self.row, *map(format_seconds, seconds), *(f"{ratio:.2f}" for ratio in ratios)]


def steps_of(folder: Path, device: Device) -> list[StepSeconds]:
    """The training steps of a folder."""
    peak = replace(device, efficiency=PEAK)
    steps = list[StepSeconds]()
    for row in rows_of(folder, [_STEPS]):
        measured, module = _read(folder, row)
        steps.append(
            StepSeconds(
                row.removeprefix(_STEPS),
                measured["clock_s"],
                measured["busy_s"],
                replay(module, peak).step_s,
                replay(module, device).step_s,
                dispatch_seconds(len(module.entry.parameters)),
            )
        )
    return steps


def step_table(steps: Sequence[StepSeconds]) -> str:
    """The table of the README."""
    head = (
        "step",
        "measured",
        "roofline",
        "predicted",
        "host, predicted",
        "roofline / kernels",
        "predicted / kernels",
        "with the host / measured",
    )
    return grid(head, (step.cells for step in steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    parser.add_argument("--device", default="h200", help="the card, by memplan's name")
    parser.add_argument("--rows", nargs="*", default=[""], metavar="NAME")
    parser.add_argument("--table", action="store_true", help="write the README's table")
    options = parser.parse_args()
    device = catalog.named(options.device)
    if options.table:
        readme = _HERE / "README.md"
        table = step_table(steps_of(options.folder, device))
        write_atomic(readme, inserted(readme.read_text(), table, "steps"))
        return
    print("| row | class | kernels | measured | modelled | modelled over measured |")
    print("|---|---|---:|---:|---:|---:|")
    for row in rows_of(options.folder, options.rows):
        for each in class_seconds(options.folder, row, device):
            seconds = f"{format_seconds(each.measured_s)} | {format_seconds(each.modelled_s)}"
            print(f"| {row} | {each.name} | {each.kernels} | {seconds} | {each.ratio:.2f} |")


if __name__ == "__main__":
    main()
