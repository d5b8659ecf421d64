"""The table of sizes, by hand and as committed."""

from __future__ import annotations

from experiments.size import run
from experiments.size.run import MIB, Row, table
from memplan.units import parse_bytes


def test_rows_that_fit_and_rows_that_do_not() -> None:
    fits = Row(64, "1GiB", "milp", 5000 * MIB, 1000 * MIB, 0, 0.2, None, 1.0)
    fails = Row(128, "1GiB", "none", None, None, None, None, 2000 * MIB, 1.0)
    told = table([fails, fits]).splitlines()[2:]
    assert told[0] == "| 64 | 1GiB | 5000 | milp | 1000 | 0 | 200.0 | 320 |"
    assert told[1] == "| 128 | 1GiB |  | nothing fits; 2000 works |  |  |  |  |"


def test_readme_is_what_the_results_say() -> None:
    assert run.README.read_text() == run.regenerate()


def test_every_result_is_within_its_budget() -> None:
    rows = run.known()
    assert rows and set(rows) <= set(run.CASES)
    for row in rows.values():
        assert row.device_bytes is None or row.device_bytes <= parse_bytes(row.budget, 0)
