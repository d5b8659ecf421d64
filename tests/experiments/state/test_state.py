"""The committed results, and the tables made of them."""

from __future__ import annotations

from experiments.readme import inserted
from experiments.state.run import CASES, README, known, table
from memplan.units import parse_bytes


def test_readme_is_what_the_results_say() -> None:
    text = README.read_text()
    assert text == inserted(text, table())


def test_every_result_is_within_its_budget_with_its_state_on_the_host() -> None:
    rows = list(known())
    assert rows and {row.name for row in rows} <= set(CASES)
    for row in rows:
        assert row.device_bytes is not None and row.device_bytes <= parse_bytes(row.budget, 0)
        assert row.host_bytes >= 0.99 * row.state_bytes
