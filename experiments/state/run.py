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

from experiments.readme import measure_and_tell
from memplan import pipeline
from memplan.pipeline import Request
from models.train import decoder_step
from models.transformer import DecoderConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
OPTIONS = {"donate_argnums": 0}
UNLIMITED = 2**62  # bytes: the step stays as it is
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
      plain_bytes, plain_step_s: of the step as it is, with its state on the device.
      predicted_bytes: on the device, before it was compiled.
      copy_s: during which the busier direction of the link is busy; hidden_copy_s: of these, under computation.
      stall_s: during which nothing is computed.
    """

    name: str
    budget: str
    planner: str
    state_bytes: int
    plain_bytes: int
    predicted_bytes: int
    device_bytes: int
    host_bytes: int
    plain_step_s: float
    step_s: float
    copy_s: float
    hidden_copy_s: float
    stall_s: float
    planning_s: float


def measure(case: Case) -> Row:
    config = DecoderConfig(width=case.width, heads=case.width // 64, scan=case.scan)
    step, args = decoder_step(batch=case.batch, tokens=1024, config=config)
    plain = pipeline.best(step, args, {}, OPTIONS, Request(UNLIMITED, device=case.device)).planned.plain
    request = Request(case.budget, "64GiB", case.device, host_state=(0,))
    start = time.perf_counter()
    found = pipeline.run(step, args, {}, OPTIONS, request, lambda stage, share: print(stage, flush=True))
    moved = found.planned.result.traffic
    return Row(
        case.name, case.budget, found.plan.planner if found.plan else "none",
        sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(args[0])),
        plain.device_bytes, found.planned.predicted_bytes, found.device_bytes, found.host_bytes,
        plain.traffic.step_s, found.step_s, moved.copy_s, moved.hidden_copy_s,
        sum(end - start for start, end in moved.stalls), time.perf_counter() - start,
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
        state, plain, device, predicted, host = (f"{one / MIB:.0f}" for one in nbytes)
        times = row.plain_step_s, row.step_s, row.copy_s, row.stall_s
        before, after, copies, stalled = (f"{1e3 * one:.0f}" for one in times)
        hidden = f"{row.hidden_copy_s / row.copy_s:.0%}" if row.copy_s else ""
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
