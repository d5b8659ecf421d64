"""Views of handwritten rows."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.bench import views
from experiments.bench.cases import LARGE_IMAGES, SPEED
from experiments.bench.measures.curve import rows_of
from experiments.bench.views import comparisons, cost, missed, rival_sums, slower, summary
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from memplan.units import parse_bytes

MIB = 2**20
ROW = {
    "case": "a", "device": "v100", "budget": 50, "status": "fits", "budget_bytes": 60,
    "plain_bytes": 100,
    "plain_step_s": 1.0, "plain_compile_s": 2.0, "predicted_bytes": 51, "compiled_bytes": 50,
    "host_bytes": 0,
    "step_s": 1.1, "compilations": 1, "ready_s": 6.0,
}  # fmt: skip
FAILED = {"case": "d", "device": "v100", "budget": 70, "status": "failed", "reason": "no time"}


def cells(text: str, number: int = 0) -> list[str]:
    """The cells of a row of the first table."""
    return [cell.strip() for cell in text.splitlines()[2 + number][1:-1].split("|")]


def test_what_follows_from_a_row() -> None:
    assert missed(ROW) == pytest.approx(0.02)
    assert slower(ROW) == pytest.approx(0.1)
    assert cost(ROW) == pytest.approx(3.0)
    assert missed({**ROW, "status": "untouched", "predicted_bytes": 100}) is None
    assert slower({**ROW, "status": "does not fit"}) is None
    assert cost(FAILED) is None


def test_the_summary_counts_what_fits_and_what_it_costs() -> None:
    rows: list[Any] = [
        ROW,
        {**ROW, "case": "b", "compilations": 2, "step_s": 1.3},
        {**ROW, "case": "c", "status": "untouched", "budget": 70, "step_s": 1.0},
        FAILED,
    ]
    fits, truth, over, costs, compilations = summary(rows)
    assert fits == "fits: 3 of 4 (d)"
    assert truth.endswith(
        "off by median 2.00%, 90th percentile 2.00%, worst 2.00%; right at the first compilation: "
        "1 of 3"
    )
    assert over.endswith("median 20.0%, 90th percentile 30.0%, worst 30.0%")
    assert "by the clock median 3.0" in costs and "threads not measured" in costs
    assert "worst 2.0" in compilations


def test_rows_that_did_not_come_to_figures_are_told() -> None:
    assert cells(views.budgets([{**FAILED, "required": True}]))[:4] == ["d", "", "", "failed"]
    assert (
        cells(views.public([{**ROW, "status": "does not fit", "floor_bytes": 3 * MIB}]))[3]
        == "does not fit: floor 3"
    )


def test_a_link_is_told_with_its_speed() -> None:
    row = {
        **ROW,
        "case": "pcie3x16",
        "device": "v100@pcie3x16",
        "again": 0,
        "offloaded_bytes": 3 * MIB,
    }
    text = views.links(
        [{**row, "copy_s": 0.04, "hidden_copy_s": 0.03}, {**row, "device": "v100", "copy_s": 0.0}]
    )
    assert cells(text)[:2] == ["pcie3x16", "13.4"] and cells(text)[4:] == [
        "3",
        "40",
        "75%",
        "1100.0",
        "+10.0%",
    ]
    assert cells(text, 1)[1] == "" and cells(text, 1)[6] == ""


def of_loop(method: dict[str, Any], nbytes: int, step_s: float) -> dict[str, Any]:
    row = {
        "of": "h200-f32",
        "budget": None,
        "compiled_bytes": nbytes,
        "step_s": step_s,
        "copy_s": 0.0,
        "host_bytes": 0,
    }
    return row | {"predicted_bytes": nbytes, "stacked_bytes": 2 * MIB, "moved_bytes": 0} | method


def test_the_fastest_of_either_kind_that_fits_a_share() -> None:
    rows = [
        of_loop({}, 100, 1.0), of_loop({"policy": "dots"}, 45, 4.0),
        of_loop({"budget": 50}, 50, 2.0), of_loop({"budget": 30}, 30, 3.0),
    ]  # fmt: skip
    against = views.loops(rows)
    assert cells(against) == [
        "h200-f32",
        "50%",
        "1000.0",
        "2000.0",
        "0",
        "jax.checkpoint, dots",
        "4000.0",
    ]
    assert cells(against, 1)[3:] == ["3000.0", "0", "none fits", ""]
    assert cells(against, 2)[3:] == ["", "", "none fits", ""]
    assert "memplan within 30%, 2 MiB kept, 0 moved" in against


POLICY = "jax.checkpoint, nothing saved"


def by_hand() -> list[dict[str, Any]]:
    """Plain takes 1000 bytes and 0.1 s.

    At 75 % all methods fit, at 50 % memplan and a policy, at 35 % memplan, at 25 % nothing.
    """

    def planned(method: str, budget: int, seconds: float | None) -> Point:
        return Point(method, budget, None if seconds is None else budget - 1, 0, seconds)

    points = [Point("plain jax", None, 1000, 0, 0.1), Point(POLICY, None, 500, 0, 0.14)]
    for budget, own, xla in (
        (750, 0.101, 0.102),
        (500, 0.105, None),
        (350, 0.12, None),
        (250, None, None),
    ):
        points += [
            planned(MEMPLAN, budget, own),
            planned(XLA, budget, xla),
            Point(BOUND, budget, budget, 0, 0.09),
        ]
    return [
        {"case": "step", **row}
        for row in rows_of(Curve(tuple(points), "v100", 1000, 0.1, 200)).rows
    ]


def test_a_policy_counts_where_it_fits_and_nothing_else_does() -> None:
    rows = list(comparisons("step", list(by_hand())))
    assert [row["share"] for row in rows] == [0.75, 0.5, 0.35, 0.25]
    assert [row["policy_s"] for row in rows] == [0.14, 0.14, None, None]
    assert [row["own_s"] for row in rows] == [0.101, 0.105, 0.12, None]


def test_the_sums_of_rivals_are_those_of_the_rows() -> None:
    text = " ".join(rival_sums(list(comparisons("step", list(by_hand())))))
    assert (
        "3 of 4 cases have a plan of memplan's own that fits; XLA's own fits in 1, a policy in 2."
        in text
    )
    assert "In 2 of the 2 cases where any rival fits" in text
    assert (
        "In 1 of the 1 cases where XLA's own fits, memplan's own plan is faster; in 2 more" in text
    )
    assert "Median overhead at 50 %: 5.0% over 1 steps." in text
    assert "Median distance to the bound: 16.7%; programs that are below it: 0." in text
    last = "| step | 25% | 100.0 | none fits |  | none fits | none fits | 90.0 |"
    assert last in views.rivals(list(by_hand()))


def test_sizes_are_told_for_every_way() -> None:
    def row(method: str, **figures: Any) -> dict[str, Any]:
        return {"device": "v100", **LARGE_IMAGES[f"resnet50-batch-v100-{method}"].facts, **figures}

    figures = {"compiled_bytes": 2**30, "host_bytes": MIB, "step_s": 1.0}
    text = views.large_images(
        [
            row("plain", size=240, **figures),
            row("xla"),
            row("memplan", size=480, limit="x", **figures),
        ]
    )
    assert "| resnet50-batch | v100 | 240 |  |  | 480 | 2.0x |  | x |" in text
    assert (
        f"| resnet50-batch | v100 | memplan | 480 | 1024 | 1 | 1000 | {480 * 224**2 / 1e6:.1f} |"
        in text
    )


@pytest.mark.parametrize("view", [views.size, views.state, views.slabs])
def test_what_jax_jit_takes_by_default_stands_beside_the_unmodified_step(view: Any) -> None:
    figures = {"plain_bytes": 20 * MIB, "unmodified_bytes": 30 * MIB, "samples": 1, "of": "images"}
    text = view([{**ROW, **figures, "planner": "kernels", "batch": 1}])
    by_head = dict(zip(cells(text, -2), cells(text), strict=True))
    assert (by_head["jax.jit MiB"], by_head["unmodified MiB"]) == ("20", "30")


def test_speeds_are_told_where_a_way_fits() -> None:
    case = next(case for case in SPEED.values() if case.name.startswith("unet3d-volume-v100"))
    budget = parse_bytes(str(case.budget), 0)
    figures = {
        "plain_bytes": 1,
        "jit_step_s": 0.5,
        "compiled_bytes": MIB,
        "step_s": 0.25,
        "host_bytes": 0,
    }
    row = {"device": "v100", "status": "fits", "budget_bytes": budget, **case.facts, **figures}
    text = cells(views.speed([{**row, "checkpoint_bytes": budget + 1, "checkpoint_step_s": 1.0}]))
    assert text == [
        "unet3d-volume",
        "v100",
        "64",
        f"{64**3 / 5e5:.1f}",
        "",
        f"{64**3 / 2.5e5:.1f}",
        "1",
        "0",
    ]


def test_meshes_have_what_was_published_beside_them() -> None:
    facts = {
        "case": "resnet50-ddl",
        "device": "p100",
        "published": ("ResNet", 0.95),
        "bound_bytes": 2 * MIB,
    }
    figures = {
        "step_s": 0.11,
        "jit_step_s": 0.22,
        "collective_s": 0.02,
        "hidden_collective_s": 0.01,
    }
    rows = [
        {**facts, **figures, "way": method, "sent_bytes": sent * MIB, "efficiency": 0.94}
        for method, sent in (("jax.jit", 4), ("memplan.jit", 2))
    ]
    published, text = views.meshes(rows).split("\n\n")
    assert cells(published) == ["ResNet", "95%", "94.0%"]
    assert cells(text, 1)[1:] == [
        "memplan.jit",
        "2.0",
        "2.0",
        "110.0",
        "20.0",
        "50%",
        "0.50",
        "94.0%",
    ]
