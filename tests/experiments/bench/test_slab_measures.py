"""Measures of slabs on the CPU: memory of a training process, and the error after ten steps."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from experiments.bench import cases, views
from experiments.bench.cases import Case
from experiments.bench.measures import aborts, resident, slab_numbers
from experiments.bench.questions import QUESTIONS
from experiments.bench.runner import apart
from experiments.bench.slab_steps import FACES, Face, attention, regions, wide_mlp
from experiments.bench.tables import Rows


def test_regions_are_whole_numbers_below_the_classes_with_an_intensity_each() -> None:
    batch = regions(12, 5)
    image, label = np.asarray(batch["image"])[0, ..., 0], np.asarray(batch["label"])[0]
    assert set(np.unique(label)) == set(range(5)) and label[0, 0, 0] == 0
    means = [image[label == region].mean() for region in range(5)]
    assert all(np.abs(image[label == region] - means[region]).std() < 0.3 for region in range(5))


def test_a_process_that_trains_has_a_resident_set_and_losses_that_fall() -> None:
    [row] = resident.measure(Case("small", wide_mlp, budget=70)).rows
    assert (
        row["losses"] == sorted(row["losses"], reverse=True)
        and len(row["seconds"]) == resident.STEPS
    )
    assert (
        row["compiled_bytes"]
        <= row["budget_bytes"]
        < row["plain_bytes"]
        < row["peak_rss"]
        < row["machine_bytes"]
    )
    assert "volume" in views.resident([{**row, "case": "volume"}])


@pytest.mark.slow
def test_a_volume_in_slabs_trains_as_it_does_whole_in_less_memory() -> None:
    plain, slabs = (
        apart(QUESTIONS["resident"], cases.RESIDENT[name]).rows[0]
        for name in ("volume_64-plain", "volume_64-28")
    )
    assert slabs["slab_loops"] > 0
    np.testing.assert_allclose(slabs["losses"], plain["losses"], rtol=1e-5)
    assert slabs["peak_rss"] + plain["plain_bytes"] // 2 < plain["peak_rss"]


@pytest.mark.slow
def test_numbers_of_ten_steps_in_slabs_are_those_of_a_recompilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By LLVM's optimizations, without which two compilations do not round differently."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    face = Face(partial(attention, 8, 4, layers=1), "query rows", (8, 8), 0, 4)
    case = Case("attention", face.make, facts={"face": face})
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        rows: Rows = list(process.submit(slab_numbers.measure, case).result().rows)
    assert [row["written"] for row in rows] == ["what kernels make", "sums alone"]
    assert all(row["loops"] > 1 and row["worst_array"] <= 1 for row in rows)
    assert all(0 < row["pieces_loss"] < 1e-5 and row["loss"] < 1e-5 for row in rows)
    assert "query rows" in views.numbers(
        [{**row, "case": "attention", "face": face} for row in rows]
    )


def test_an_array_that_is_off_is_told() -> None:
    """One of three arrays, by a hundred times the error of the others."""
    expected = [[np.ones(4, np.float32), np.ones(9, np.float32), np.float32(2)]] * 2
    near = [[leaf * np.float32(1 + 1e-6) for leaf in leaves] for leaves in expected]
    wrong = [[leaves[0], leaves[1] * np.float32(1 + 1e-4), leaves[2]] for leaves in expected]
    assert slab_numbers.worst_array(expected, [near], near, (0, 1)) < 1
    assert slab_numbers.worst_array(expected, [near], wrong, (0, 1)) > 10
    differences = slab_numbers.difference(expected, wrong, (0, 1))
    assert differences["loss"] == 0 and differences["parameters"] == pytest.approx(
        1e-4 * (9 / 13) ** 0.5, rel=0.01
    )


def test_every_face_has_a_case() -> None:
    assert list(cases.SLAB_NUMBERS) == list(FACES)


@pytest.mark.gpu_aot
def test_a_process_of_its_own_compiles_a_step_that_differentiates_twice() -> None:
    record = aborts.alone(4)
    assert record["loops"] and record["convolutions"] and not record["wrong"]


def test_a_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "_tell", _ends)
    assert aborts.alone(0)["wrong"] == "at the convolution: ended with -6"


def _ends(number: int, connection: Any) -> None:
    connection.send({"at": "at the convolution"})
    os.abort()
