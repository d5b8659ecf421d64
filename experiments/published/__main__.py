"""Print the table of README.md: published seconds, and those that memplan predicts.

python -m experiments.published [NAME...]

Compiles every step, or those whose card or name contains a NAME, for the absent GPU, unplanned.
Takes ten minutes on two cores; needs the extra gpu-aot.
"""

import sys
from dataclasses import replace

from experiments.published.rows import ROWS, Published
from memplan.hardware import catalog
from memplan.hardware.efficiency import PEAK
from memplan.program.lowerable import Lowerable
from memplan.units import format_seconds
from memplan.xla.replay import replay
from memplan.xla.target import Target


def predicted(row: Published) -> tuple[float, float]:
    """Seconds of a row's step: by what kernels achieve, and by the peak rates."""
    device = catalog.named(row.device)
    step, arguments = row.build()
    lowerable = Lowerable(step, arguments, options={"donate_argnums": 0})
    module = Target(device, described=True).compile(lowerable).module
    at_peak = replace(device, efficiency=PEAK)
    return replay(module, device).step_s, replay(module, at_peak).step_s


def main() -> None:
    names = sys.argv[1:] or [""]
    print("| step | card | published | predicted | over published | roofline | by |")
    print("|---|---|---:|---:|---:|---:|---|")
    for row in ROWS:
        if not any(name in f"{row.device} {row.step}" for name in names):
            continue
        seconds, at_peak_s = predicted(row)
        figures = (
            format_seconds(row.seconds),
            format_seconds(seconds),
            f"{seconds / row.seconds:.2f}",
            f"{at_peak_s / row.seconds:.2f}",
        )
        print(f"| {row.step} | {row.device} | {' | '.join(figures)} | {row.source} |", flush=True)


if __name__ == "__main__":
    main()
