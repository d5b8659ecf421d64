"""Training steps of public repositories, planned beside what the compiler makes of them as they are.

    python -m experiments.public.run --list
    python -m experiments.public.run --checkouts DIR [--only NAME ...] [--minutes 10] [--force | --keep]
    python -m experiments.public.run --checkouts DIR [--only NAME ...] --small
    python -m experiments.public.run --summary     # truth, time and cost of what is there

Compiles each step for its described GPU (extra gpu-aot) as it is and within half of the bytes that this takes, in a
process of its own, and keeps a JSON file; where nothing fits half, within 60, then 75 %. `--small` trains small
versions on the CPU instead, as they are and planned, and says whether all bits are equal. `NAME` is the beginning of a
step's name; what is measured again: see `experiments.budgets.run`. README.md says how DIR is made;
`MEMPLAN_CHECKOUTS` names it as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.budgets.bits import Training, compare_all
from experiments.budgets.harness import Suite, parser, selected
from experiments.budgets.rows import Rows, summary
from experiments.public.cases import AFTER, CASES, PERCENTS
from experiments.public.checkouts import MissingCheckoutError, checkouts_folder
from experiments.public.measure import SOURCES
from experiments.public.steps import STEPS

HERE = Path(__file__).parent
NUMBERS = HERE / "numbers.json"
SUITE = Suite(
    module="experiments.public.measure",
    devices={name: case.step.device for name, case in CASES.items()},
    results=Rows(HERE / "results"),
    sources=SOURCES,
    after=AFTER,
)


def told() -> list[str]:
    """The summary of what is there."""
    half = [name for name, case in CASES.items() if case.percent == PERCENTS[0]]
    return summary(SUITE.rows(), {}, half)


def listed() -> list[str]:
    """The steps, and where they are from."""
    return [f"{step.name:20}{step.device:6}{step.repository.name}  {step.path}" for step in STEPS.values()]


def compare_small(checkouts: Path, only: list[str] | None) -> None:
    """Trains small versions, as they are and planned."""
    compare_all(selected(STEPS, only), lambda name: Training(*STEPS[name].small_factory(checkouts)()), NUMBERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a clone is missing."""
    understood = parser(__doc__)
    understood.add_argument("--checkouts", metavar="DIR")
    understood.add_argument("--small", action="store_true")
    understood.add_argument("--list", action="store_true")
    options = understood.parse_args(argv)
    try:
        if options.small:
            compare_small(checkouts_folder(options.checkouts), options.only)
        elif not options.list and not options.summary:
            SUITE.measure(options, ["--checkouts", str(checkouts_folder(options.checkouts).absolute())])
    except MissingCheckoutError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.small:
        print("\n".join(listed() if options.list else told()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
