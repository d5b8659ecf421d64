"""The README's pictures: one step by every method, and voxels per second against the volume.

    python -m experiments.pictures    # compiles a ResNet-50 for a described V100: two minutes

The second picture shows stored results of `python -m experiments.bench speed`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import memplan
from experiments.bench.questions import QUESTIONS
from experiments.bench.tables import Rows
from memplan import api
from memplan.io import write_atomic
from memplan.report.comparison import Comparison
from memplan.report.model import Report
from memplan.report.views.pictures import encode, figure
from models import train

IMAGES = Path(__file__).parent.parent / "docs" / "images"
_GIB, _MS = 2**30, 1e3
_PLAIN, _OWN, _OTHER, _BUDGET = "0.45", "#0072b2", "#e69f00", "#d55e00"  # colours
METHODS = {
    "plain jax": "jax.jit",
    "jax.checkpoint, convolutions and dots saved": "jax.checkpoint,\nits smallest",
    "XLA's rematerialization": "XLA's remat-\nerialization",
    "memplan": "memplan",
}
"""Rows of a comparison, and their labels."""
_SPEEDS = (  # wide where lines lie on one another
    ("jax.jit", "jit_step_s", "plain_bytes", _PLAIN, 5),
    ("jax.checkpoint around each block", "checkpoint_step_s", "checkpoint_bytes", _OTHER, 2),
    ("memplan", "step_s", "compiled_bytes", _OWN, 2),
)


def of_one_step(report: Report, comparison: Comparison) -> bytes:
    """Device memory over a step, plain and planned; beside it the bytes and time by method."""
    picture = figure()
    memory, methods = picture.subplots(1, 2, width_ratios=(3, 2))
    assert report.timeline is not None
    [unmodified] = report.lines
    instants = report.timeline.instants
    for name, color, starts_s, nbytes in (
        ("unmodified", _PLAIN, unmodified.starts_s, unmodified.device_bytes),
        (
            "planned",
            _OWN,
            *zip(*((span.start_s, span.device_bytes) for span in instants), strict=True),
        ),
    ):
        times, sizes = [_MS * start_s for start_s in starts_s], [count / _GIB for count in nbytes]
        memory.step(times, sizes, where="post", color=color, label=name)
    for axis in (memory, methods):
        axis.axhline(report.budget_bytes / _GIB, color=_BUDGET, linestyle=":", label="budget")
    memory.set(xlabel="ms", ylabel="GiB on the device", title="memory over a step")
    memory.legend(fontsize="small")

    rows = [row for row in comparison.rows if row.name in METHODS]
    sizes = [(row.device_bytes or 0) / _GIB for row in rows]
    colors = {"plain jax": _PLAIN, "memplan": _OWN}
    bars = methods.bar(
        [METHODS[row.name] for row in rows],
        sizes,
        color=[colors.get(row.name, _OTHER) for row in rows],
    )
    methods.bar_label(bars, [f"{_MS * (row.step_s or 0):.0f} ms" for row in rows])
    methods.tick_params(axis="x", labelsize="x-small")
    methods.set(title="memory and time, by method")
    return encode(picture)


def of_volumes(rows: Rows) -> bytes:
    """Voxels per second against the volume, by each method where it fits."""
    picture = figure()
    axis = picture.add_subplot(xlabel="voxels", ylabel="million voxels per second", xscale="log")
    for name, seconds, nbytes, color, width in _SPEEDS:
        points = _fitting(rows, seconds, nbytes)
        axis.plot(*zip(*points, strict=True), color=color, lw=width, marker="o", label=name)
        pixels, speed = points[-1]
        axis.annotate(f"{round(pixels ** (1 / 3))}³", (pixels, speed), xytext=(4, 6),
                      textcoords="offset points", color=color)  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.legend()
    return encode(picture)


def _fitting(rows: Rows, seconds: str, nbytes: str) -> Sequence[tuple[float, float]]:
    """Voxels, and million voxels per second, of the volumes that fit by a method."""
    return [
        (row["pixels"], row["pixels"] / row[seconds] / 1e6)
        for row in rows
        if row["status"] in ("fits", "untouched") and row[nbytes] <= row["budget_bytes"]
    ]


def main() -> None:
    """Draw both pictures."""
    step, args = train.resnet_step(batch=64)
    budget, device = "2929MiB", "v100"
    comparison = api.compare(step, args, budget=budget, device=device, donate_argnums=0)
    planned = memplan.jit(step, budget=budget, device=device, donate_argnums=0).plan(*args)
    write_atomic(IMAGES / "first.png", of_one_step(planned.report, comparison))
    volumes = [
        row for row in QUESTIONS["speed"].rows() if row["case"].startswith("unet3d-volume-a100")
    ]
    write_atomic(IMAGES / "volumes.png", of_volumes(volumes))


if __name__ == "__main__":
    sys.exit(main())
