"""Batches, one small training, and the committed results with the tables made of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from experiments.readme import inserted
from experiments.skin_lesions import run
from experiments.skin_lesions.isic import Dataset
from experiments.skin_lesions.photographs import DEVIATION, MEAN
from experiments.skin_lesions.preparing import (
    classified,
    examples_of,
    outlined,
    standardized_pixels,
    training_batches,
    turned,
)
from experiments.skin_lesions.training import OUTLINER


def test_channels_are_standardized_in_single_precision() -> None:
    image = np.array([[[0, 128, 255]]], np.uint8)
    found = standardized_pixels(image)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0, 0], (np.array([0, 128, 255]) / 255 - MEAN) / DEVIATION, rtol=1e-5)


def test_batches_are_the_same_for_one_seed(dataset: Dataset) -> None:
    lesions = dataset.lesions[:6]
    first, again, other = (list(islice(training_batches(lesions, classified(8), 4, seed), 4)) for seed in (0, 0, 1))
    for one, two in zip(first, again, strict=True):
        assert one["image"].shape == (4, 8, 8, 3) and one["image"].dtype == np.float32
        assert one["label"].shape == (4,) and one["label"].dtype == np.int32
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])
    assert any(not np.array_equal(one["image"], two["image"]) for one, two in zip(first, other, strict=True))


def test_an_epoch_shows_every_lesion_once(dataset: Dataset) -> None:
    """Four batches of three are two epochs of six; brightness is the same however a photograph is turned."""
    lesions = dataset.lesions[:6]
    means = examples_of(lesions, classified(8))["image"].mean((1, 2, 3)).round(3).tolist()
    shown = [
        float(mean)
        for batch in islice(training_batches(lesions, classified(8), 3, 0), 4)
        for mean in ((batch["image"] * np.float32(DEVIATION) + np.float32(MEAN)) * 255).mean((1, 2, 3)).round(3)
    ]
    assert sorted(shown[:6]) == pytest.approx(sorted(means), abs=0.01)
    assert sorted(shown[6:]) == pytest.approx(sorted(means), abs=0.01)


def test_masks_turn_with_their_photographs() -> None:
    """All eight ways occur, and each does the same to both."""
    numbered = np.arange(9).reshape(3, 3)
    example = {"image": np.stack([numbered] * 3, -1), "label": numbered}
    ways = set()
    for seed in range(60):
        found = turned(example, np.random.default_rng(seed))
        np.testing.assert_array_equal(found["image"][..., 1], found["label"])
        ways.add(found["label"].tobytes())
    assert len(ways) == 8
    assert turned({"label": np.int32(3)}, np.random.default_rng(0)) == {"label": 3}


def test_prepared_masks_are_ones_on_the_lesion(dataset: Dataset) -> None:
    example = outlined(16)(dataset.lesions[0])
    assert example["label"].shape == (16, 16) and set(np.unique(example["label"])) == {0, 1}
    inside, outside = (example["image"][example["label"] == value].mean(0) for value in (1, 0))
    assert np.abs(inside - outside).max() > 5


def test_a_quarter_is_held_out(dataset: Dataset) -> None:
    learnt, held_out = run.split(dataset.lesions)
    assert len(held_out) == 6 and len(learnt) == 18
    assert set(learnt) | set(held_out) == set(dataset.lesions)


@pytest.mark.slow
def test_from_photographs_to_a_detector(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of few steps within its budget, whose detector tells elsewhere what it tells here."""
    tiny = replace(OUTLINER, side=16, batch=4, steps=10, filters=2, budget_share=0.9)
    monkeypatch.setattr(run, "CLASSIFIER", tiny)
    found, deployment = run.classes(dataset, tmp_path / "detector.bin")
    assert found.device_bytes <= found.budget_bytes < found.plain_bytes
    assert found.losses_off < 1e-3
    assert np.isfinite(found.last_loss) and set(found.scores) == {"balanced accuracy", "area under ROC"}
    assert deployment.photographs == deployment.same == 6 and deployment.off == 0
    assert deployment.accuracy == found.scores["balanced accuracy"]


def test_results_are_within_budget_and_the_detector_agrees() -> None:
    trainings, deployment = run.known()
    for row in trainings:
        assert row.device_bytes <= row.budget_bytes < row.plain_bytes
        assert row.last_loss < row.first_loss
    assert deployment.same == deployment.photographs
    assert deployment.accuracy == trainings[1].scores["balanced accuracy"]


def test_readme_is_what_the_results_say() -> None:
    text = run.README.read_text()
    assert text == inserted(text, run.tables())
