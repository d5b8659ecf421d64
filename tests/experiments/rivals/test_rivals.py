"""What the table of rivals says, from curves by hand and from those that are committed."""

from __future__ import annotations

from experiments.rivals import run
from experiments.rivals.run import comparisons, sums, table
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point

POLICY = "jax.checkpoint, nothing saved"


def planned(way: str, budget: int, seconds: float | None) -> Point:
    return Point(way, budget, None if seconds is None else budget - 1, 0, seconds)


def by_hand() -> Curve:
    """Plain: 1000 bytes, 0.1 s. At 75 % all fit, at 50 % memplan and a policy, at 35 % memplan, at 25 % nothing."""
    points = [Point("plain jax", None, 1000, 0, 0.1), Point(POLICY, None, 500, 0, 0.14)]
    for budget, own, xla in ((750, 0.101, 0.102), (500, 0.105, None), (350, 0.12, None), (250, None, None)):
        points += [planned(MEMPLAN, budget, own), planned(XLA, budget, xla), Point(BOUND, budget, budget, 0, 0.09)]
    return Curve(tuple(points), "v100", 1000, 0.1, 200)


def test_a_policy_counts_where_it_fits_and_nothing_else_does() -> None:
    rows = list(comparisons("step", by_hand()))
    assert [row.share for row in rows] == [0.75, 0.5, 0.35, 0.25]
    assert [row.policy_ms for row in rows] == [140.0, 140.0, None, None]
    assert [row.rival_ms for row in rows] == [102.0, 140.0, None, None]
    assert [row.own_ms for row in rows] == [101.0, 105.0, 120.0, None]


def test_the_sums_are_those_of_the_rows() -> None:
    told = " ".join(sums(list(comparisons("step", by_hand()))))
    assert "3 of 4 cases have a plan of memplan's own that fits; XLA's own fits in 1, a policy in 2." in told
    assert "In 2 of the 2 cases where any rival fits" in told
    assert "In 1 of the 1 cases where XLA's own fits, memplan's own plan is faster; in 2 more" in told
    assert "Median overhead at 50 %: 5.0% over 1 steps." in told
    assert "Median distance to the bound: 16.7%; programs that are below it: 0." in told


def test_rows_without_a_plan_say_so() -> None:
    assert "| step | 25% | 100.0 | none fits |  | none fits | none fits | 90.0 |" in table(
        list(comparisons("step", by_hand()))
    )


def test_readme_is_what_the_results_say() -> None:
    assert run.README.read_text() == run.regenerate()


def test_every_curve_belongs_to_a_step() -> None:
    known = {path for _, path in run.curves()}
    assert known.issuperset(run.RESULTS.glob("*.json"))
