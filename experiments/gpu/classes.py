"""Measured over modelled seconds, by class of kernel, of the modules whose kernels a card has timed.

python -m experiments.gpu.classes [--folder FOLDER] [--device NAME] [--rows NAME...]

The folder has pairs of files (`experiments.gpu.kernels`). The model is that of every plan
(`memplan.xla.replay`), for the described device. Needs no GPU.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.units import format_seconds
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.replay import replay

_FOLDER = Path(__file__).parent / "results" / "kernels" / "nvidia-h200"
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
    measured = json.loads((folder / f"{row}.json").read_text())["seconds"]
    module = Module.read(gzip.decompress((folder / f"{row}.hlo.gz").read_bytes()))
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    parser.add_argument("--device", default="h200", help="the card, by memplan's name")
    parser.add_argument("--rows", nargs="*", default=[""], metavar="NAME")
    options = parser.parse_args()
    device = catalog.named(options.device)
    print("| row | class | kernels | measured | modelled | modelled over measured |")
    print("|---|---|---:|---:|---:|---:|")
    for row in rows_of(options.folder, options.rows):
        for each in class_seconds(options.folder, row, device):
            seconds = f"{format_seconds(each.measured_s)} | {format_seconds(each.modelled_s)}"
            print(f"| {row} | {each.name} | {each.kernels} | {seconds} | {each.ratio:.2f} |")


if __name__ == "__main__":
    main()
