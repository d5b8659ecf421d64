"""Seconds that a card measured, beside those of the model: no kernel is lost or counted twice."""

import json
import statistics
from pathlib import Path

import pytest

from experiments.gpu.classes import _FOLDER, class_seconds, rows_of, step_table, steps_of
from memplan.hardware import catalog

H200 = catalog.named("h200")


@pytest.mark.parametrize("row", ["kernels-of-resnet-50", "products-and-memory-products-bfloat16"])
def test_classes_hold_every_second_that_was_measured(row: str) -> None:
    *classes, total = class_seconds(_FOLDER, row, H200)
    measured = json.loads((_FOLDER / f"{row}.json").read_text())["seconds"]
    assert total.measured_s == pytest.approx(sum(entry[0] for entry in measured.values()))
    assert total.measured_s == pytest.approx(sum(each.measured_s for each in classes))
    assert total.modelled_s == pytest.approx(sum(each.modelled_s for each in classes))
    assert total.kernels == len(measured) == sum(each.kernels for each in classes)


def test_kernels_of_a_loop_count_once_a_trip() -> None:
    *classes, _ = class_seconds(_FOLDER, "kernels-of-decoder-scanned-loops", H200)
    products = next(each for each in classes if each.name == "product")
    seconds = json.loads((_FOLDER / "kernels-of-decoder-scanned-loops.json").read_text())["seconds"]
    launches = {op: count for op, (_, count, _) in seconds.items()}
    assert products.kernels == sum(
        count for op, count in launches.items() if "dot" in op or "custom-call" in op
    )


def test_rows_of_small_calls_are_left_out() -> None:
    assert "kernels-of-resnet-50" in rows_of(_FOLDER)
    assert not any(row.startswith("calls-") for row in rows_of(_FOLDER))
    assert rows_of(_FOLDER, ["products"]) == [
        "products-and-memory-products-bfloat16",
        "products-and-memory-products-float32",
    ]


def test_steps_are_predicted_as_the_readme_says() -> None:
    """Within 20 % of the measured seconds, in the median within 10 %."""
    steps = steps_of(_FOLDER, H200)
    assert step_table(steps) in (Path(_FOLDER).parents[2] / "README.md").read_text()
    ratios = [(step.modelled_s + step.dispatch_s) / step.measured_s for step in steps]
    assert 0.8 < min(ratios) <= max(ratios) < 1.2
    assert 0.9 < statistics.median(ratios) < 1.1


def test_classes_that_matter_are_within_a_quarter() -> None:
    """Those that take 1 % of a training step."""
    for row in rows_of(_FOLDER, ["kernels-of"]):
        *classes, total = class_seconds(_FOLDER, row, H200)
        for each in classes:
            if each.measured_s > 0.01 * total.measured_s:
                assert 0.75 < each.ratio < 1.25, (row, each.name)
