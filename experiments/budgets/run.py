"""Plans and compiles every case for its described GPU, each in a process of its own, and keeps one JSON file for each.

    python -m experiments.budgets.run [--only NAME ...] [--minutes 10] [--force | --keep]
    python -m experiments.budgets.run --summary     # truth, time and cost of what is there

`NAME` is a case or the beginning of one. A row that this version of memplan, the models, jax and the compiler made is
not measured again; `--force` measures all, `--keep` only cases that no version has measured.
"""

from __future__ import annotations

from pathlib import Path

from experiments.budgets.cases import CASES
from experiments.budgets.harness import Suite, parser
from experiments.budgets.rows import Rows, former, summary

HERE = Path(__file__).parent
BEFORE = HERE / "before.json"
SUITE = Suite(
    module="experiments.budgets.measure",
    devices={name: case.device for name, case in CASES.items()},
    results=Rows(HERE / "results"),
)


def told() -> list[str]:
    """The summary of what is there."""
    half = [name for name, case in CASES.items() if case.budget == 50]
    return summary(SUITE.rows(), former(BEFORE), half)


def main() -> None:
    options = parser(__doc__).parse_args()
    if not options.summary:
        SUITE.measure(options)
    print("\n".join(told()))


if __name__ == "__main__":
    main()
