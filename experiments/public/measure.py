"""One public step under one budget, planned and compiled: `python -m experiments.public.measure CASE --checkouts DIR`.

Prints the row as JSON. A process of its own measures one case, as in `experiments.budgets.measure`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from experiments.budgets.measure import measure
from experiments.public.cases import CASES
from experiments.public.checkouts import checkouts_folder

SOURCES = ("memplan/**/*.py", "experiments/public/checkouts.py", "experiments/public/*steps.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--checkouts", metavar="DIR")
    options = parser.parse_args()
    os.environ["MEMPLAN_CACHE"] = "off"
    case = CASES[options.case]
    step, args, donated = case.step.factory(checkouts_folder(options.checkouts))()
    row = measure(case.name, step, args, case.step.device, case.percent, donated, SOURCES)
    print(json.dumps(asdict(row), allow_nan=False))


if __name__ == "__main__":
    main()
