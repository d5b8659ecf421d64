"""A decoder whose parameters and AdamW moments are larger than the device: state in host memory.

python -m experiments.state.run [--only NAME ...]    # plans and compiles (extra gpu-aot), writes results/
python -m experiments.state.run --table              # rewrites the table of README.md
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

import memplan
from experiments.readme import measure_and_tell
from models.train import decoder_step
from models.transformer import DecoderConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A decoder of 24 layers (float32, 1024 tokens), a device and a budget; `scan`: one loop over the layers."""

    device: str
    width: int
    batch: int
    budget: str
    scan: bool = False

    @property
    def name(self) -> str:
        return f"{self.device}-{self.width}-b{self.batch}" + ("-scan" if self.scan else "")


CASES = {
    case.name: case
    for case in (
        Case("v100", 3072, 1, "15GiB"),
        Case("v100", 3072, 1, "15GiB", scan=True),
        Case("h200", 3072, 8, "15GiB"),
        Case("h200", 3072, 16, "24GiB"),
        Case("h200", 3072, 16, "24GiB", scan=True),
        Case("h200", 3072, 32, "36GiB"),
    )
}


@dataclass(frozen=True)
class Row:
    """Bytes by the compiler, seconds by the roofline.

    Attributes:
      state_bytes: of parameters and moments.
      plain_bytes: on the device, as the step is.
      predicted_bytes: on the device, before it was compiled.
      copy_s: during which the busier direction of the link is busy; hidden_copy_s: of these, under computation.
      stall_s: during which nothing is computed.
    """

    name: str
    budget: str
    planner: str
    state_bytes: int
    plain_bytes: int | None
    predicted_bytes: int
    device_bytes: int | None
    host_bytes: int
    plain_step_s: float | None
    step_s: float | None
    copy_s: float | None
    hidden_copy_s: float | None
    stall_s: float | None
    planning_s: float


def measure(case: Case) -> Row:
    config = DecoderConfig(width=case.width, heads=case.width // 64, scan=case.scan)
    step, args = decoder_step(batch=case.batch, tokens=1024, config=config)
    planned = memplan.jit(
        step, device=case.device, budget=case.budget, host_budget="64GiB", host_state=0, donate_argnums=0
    )
    start = time.perf_counter()
    report = planned.plan(*args).report
    return Row(
        case.name, case.budget, report.planner,
        sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(args[0])),
        report.baseline_peak_bytes, report.predicted_peak_bytes, report.compiled_peak_bytes, report.host_peak_bytes,
        report.baseline_step_s, report.predicted_step_s, report.copy_s, report.hidden_copy_s, report.stall_s,
        time.perf_counter() - start,
    )  # fmt: skip


def known() -> Iterator[Row]:
    paths = (RESULTS / f"{name}.json" for name in CASES)
    yield from (Row(**json.loads(path.read_text())) for path in paths if path.exists())


def table() -> str:
    lines = [
        "| case | state MiB | plain MiB | budget | chosen | device MiB | predicted | host MiB | plain ms | ms "
        "| copies ms | under computation | stalled ms |",
        "|---" * 13 + "|",
    ]
    for row in known():
        nbytes = row.state_bytes, row.plain_bytes, row.device_bytes, row.predicted_bytes, row.host_bytes
        state, plain, device, predicted, host = (f"{(one or 0) / MIB:.0f}" for one in nbytes)
        times = row.plain_step_s, row.step_s, row.copy_s, row.stall_s
        before, after, copies, stalled = (f"{1e3 * (one or 0):.0f}" for one in times)
        hidden = f"{(row.hidden_copy_s or 0) / row.copy_s:.0%}" if row.copy_s else ""
        cells = (
            row.name, state, plain, row.budget, row.planner, device, predicted, host,
            before, after, copies, hidden, stalled,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    measure_and_tell(__doc__, CASES, lambda name: json.dumps(asdict(measure(CASES[name])), indent=1), README, table)


if __name__ == "__main__":
    main()
