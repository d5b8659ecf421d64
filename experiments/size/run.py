"""The largest batch of ResNet-50 that a 16 GB card takes, and the least memory that a batch of 64 takes.

python -m experiments.size.run [--only BATCH ...]    # plans and compiles (extra gpu-aot), writes results.json
python -m experiments.size.run --table               # rewrites the table of README.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import memplan
from experiments.readme import inserted
from memplan.errors import InfeasibleBudgetError
from memplan.io import write_atomic
from models.train import resnet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results.json", HERE / "README.md"
DEVICE = "v100"
CASES = {64: ("1250MiB", "0"), 240: ("15GiB", "0"), 448: ("15GiB", "0"), 768: ("15GiB", "256GiB"),
         1024: ("15GiB", "256GiB"), 1152: ("15GiB", "256GiB"), 1216: ("15GiB", "256GiB")}  # fmt: skip
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A batch on the device: bytes by the compiler, None where nothing fits; seconds of a step by the roofline.

    Attributes:
      smallest_bytes: where nothing fits, the smallest budget that was found to work.
      planning_s: for the whole call, all compilations included.
    """

    batch: int
    budget: str
    planner: str
    plain_bytes: int | None
    device_bytes: int | None
    host_bytes: int | None
    step_s: float | None
    smallest_bytes: int | None
    planning_s: float


def measure(batch: int) -> Row:
    budget, host_budget = CASES[batch]
    step, args = resnet_step(batch=batch, depth=50)
    planned = memplan.jit(step, device=DEVICE, budget=budget, host_budget=host_budget, donate_argnums=0)
    start = time.perf_counter()
    try:
        report = planned.plan(*args).report
    except InfeasibleBudgetError as error:
        spent = time.perf_counter() - start
        return Row(batch, budget, "none", None, None, None, None, error.smallest_bytes, spent)
    return Row(
        batch, budget, report.planner, report.baseline_peak_bytes, report.compiled_peak_bytes, report.host_peak_bytes,
        report.predicted_step_s, None, time.perf_counter() - start,
    )  # fmt: skip


def known() -> dict[int, Row]:
    return {one["batch"]: Row(**one) for one in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}


def save(rows: Iterable[Row]) -> None:
    """Written whole or not at all."""
    ordered = [asdict(row) for row in sorted(rows, key=lambda row: row.batch)]
    write_atomic(RESULTS, json.dumps(ordered, indent=1) + "\n")


def table(rows: Iterable[Row]) -> str:
    names = ("batch", "budget", "unmodified MiB", "chosen", "device MiB", "host MiB", "step ms", "images/s")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: row.batch):
        if row.step_s is None:
            least = f"nothing fits; {_mib(row.smallest_bytes)} works"
            cells = (row.batch, row.budget, "", least, "", "", "", "")
        else:
            figures = _mib(row.plain_bytes), row.planner, _mib(row.device_bytes), _mib(row.host_bytes)
            cells = (row.batch, row.budget, *figures, f"{1e3 * row.step_s:.1f}", f"{row.batch / row.step_s:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.0f}"


def regenerate() -> str:
    """The README with the table of the results that are there."""
    return inserted(README.read_text(), table(known().values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", type=int, metavar="BATCH", choices=CASES)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        for batch in args.only or CASES:
            row = measure(batch)
            save({**known(), batch: row}.values())
            print(row, flush=True)
    write_atomic(README, regenerate())


if __name__ == "__main__":
    main()
