"""The committed results, and the tables made of them."""

from __future__ import annotations

from experiments.loops.run import CASES, README, Row, fastest, rows_of, tables
from experiments.readme import inserted


def row(way: str, device_bytes: int, step_s: float) -> Row:
    return Row(way, device_bytes, 0, step_s, None, 0.0, 0.0)


def test_the_fastest_that_fits_of_either_kind() -> None:
    rows = [
        row("plain", 100, 1.0),
        row("memplan, a", 50, 3.0),
        row("memplan, b", 60, 2.0),
        row("jax.checkpoint, c", 9, 4.0),
    ]
    assert fastest(rows, 60, memplan=True) is rows[2]
    assert fastest(rows, 59, memplan=True) is rows[1]
    assert fastest(rows, 49, memplan=True) is None
    assert fastest(rows, 49, memplan=False) is rows[3]


def test_readme_is_what_the_results_say() -> None:
    text = README.read_text()
    assert text == inserted(text, tables())


def test_every_case_has_a_plain_program_and_plans_that_are_smaller() -> None:
    for name in CASES:
        plain, *others = rows_of(name)
        assert plain.way == "plain"
        assert any(one.way.startswith("memplan") and one.device_bytes < plain.device_bytes / 5 for one in others)
