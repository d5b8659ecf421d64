"""Simulated scaling as tables and JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.report.scaling import Assumed, Count, Point, Scaling

GIB = 2**30


@pytest.fixture
def scaling() -> Scaling:
    points = (
        Point("1x1", 1, 0.4, 0.4, 0.0, 0.0, 1.0, 1.0),
        Point("512x4", 2048, 0.5, 0.4, 0.2, 0.15, 1.025, 0.8),
    )
    assumed = Assumed("spread", 0.01, "of kernels <of a GPU>")
    return Scaling(
        "p100", "ddl", "2x4", 3 * GIB, 4 * GIB, "none", (), 0.4, (Count("all-reduce(host)", 2),), (assumed,),
        ("links carry one collective at a time",), points, (("jax", "0.11.2"),),
    )  # fmt: skip


def test_json_brings_every_field_back(scaling: Scaling) -> None:
    assert Scaling.from_json(scaling.to_json()) == scaling


def test_a_point_is_told_in_shares(scaling: Scaling) -> None:
    _, points, assumed = scaling.tables(0)
    alone, many = (dict(zip(points.columns, row, strict=True)) for row in points.rows)
    assert (alone[">hidden"], alone[">slowest"], alone[">efficiency"]) == ("", "+0.0%", "100.0%")
    assert (many[">devices"], many[">hidden"], many[">slowest"], many[">efficiency"]) == (
        "2,048",
        "75%",
        "+2.5%",
        "80.0%",
    )
    assert assumed.rows == (
        ("spread", "0.01", "of kernels <of a GPU>"), ("", "", "links carry one collective at a time"),
    )  # fmt: skip


def test_collectives_that_are_not_as_written_are_told(scaling: Scaling) -> None:
    def first(known: Scaling) -> dict[str, str]:
        return {name.strip(): text for name, text in known.tables(0)[0].rows}

    assert (
        first(scaling)["collectives in a step"] == "2 all-reduce(host)" and first(scaling)["not as written"] == "none"
    )
    other = replace(scaling, unexpected=("one more", "one less"), collectives=())
    assert first(other)["not as written"] == "one more; one less"
    assert first(other)["collectives in a step"] == "none"
