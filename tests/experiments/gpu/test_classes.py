"""Seconds that a card measured, beside those of the model: no kernel is lost or counted twice."""

import json

import pytest

from experiments.gpu.classes import _FOLDER, class_seconds, rows_of
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
