"""One step under one budget, planned for five host links and for none: what the way to the host is worth.

python -m experiments.link_speed.run [--only LINK ...]    # plans and compiles (extra gpu-aot), writes results/
python -m experiments.link_speed.run --table              # rewrites the table of README.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.readme import measure_and_tell
from memplan import pipeline
from memplan.hardware.catalog import named
from memplan.pipeline import Request
from memplan.planning.schedule import Kind
from models.train import googlenet_step

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
LINKS = ("pcie3x16", "pcie4x16", "pcie5x16", "power9-nvlink2", "nvlink-c2c")
CASES = ("none", *LINKS)
DEVICE, BUDGET, HOST_BUDGET = "v100", "2GiB", "256GiB"
IMAGE, BATCH = 1120, 5
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """What was planned for a link: bytes by the compiler, seconds by the replay of what was compiled.

    Attributes:
      link: by name; "none" where nothing may go to the host.
      again: kernels that run once more.
      offloaded_bytes: that go to the host.
      copy_s: during which the busier direction of the link is busy; hidden_copy_s: of these, under computation.
    """

    link: str
    plain_bytes: int
    plain_step_s: float
    device_bytes: int
    again: int
    offloaded_bytes: int
    step_s: float
    copy_s: float
    hidden_copy_s: float


def measure(link: str) -> Row:
    step, args = googlenet_step(image=IMAGE, batch=BATCH)
    device, host_budget = (DEVICE, 0) if link == "none" else (f"{DEVICE}@{link}", HOST_BUDGET)
    found = pipeline.run(step, args, {}, {"donate_argnums": 0}, Request(BUDGET, host_budget, device), _tell)
    made = found.planned
    runs, moved = sum(one.kind is Kind.RUN for one in made.schedule), made.result.traffic
    return Row(
        link, made.plain.device_bytes, made.plain.traffic.step_s, found.device_bytes,
        runs - len(made.base.problem.kernels), int(moved.copied_out_nbytes),
        found.step_s, moved.copy_s, moved.hidden_copy_s,
    )  # fmt: skip


def _tell(stage: str, share: float | None) -> None:
    print(stage, flush=True)


def known() -> Iterator[Row]:
    paths = (RESULTS / f"{link}.json" for link in CASES)
    yield from (Row(**json.loads(path.read_text())) for path in paths if path.exists())


def table() -> str:
    names = ("link", "GB/s", "device MiB", "kernels again", "to the host MiB", "copies ms", "under computation",
             "step ms", "over plain")  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *map(_line, known())]) + "\n"


def _line(row: Row) -> str:
    speed = "" if row.link == "none" else f"{named(f'{DEVICE}@{row.link}').link.bandwidth / 1e9:.1f}"
    hidden = f"{row.hidden_copy_s / row.copy_s:.0%}" if row.copy_s else ""
    cells = (
        row.link, speed, f"{row.device_bytes / MIB:.0f}", row.again, f"{row.offloaded_bytes / MIB:.0f}",
        f"{1e3 * row.copy_s:.0f}", hidden, f"{1e3 * row.step_s:.1f}", f"{row.step_s / row.plain_step_s - 1:+.1%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    measure_and_tell(__doc__, CASES, lambda link: json.dumps(asdict(measure(link)), indent=1), README, table)
