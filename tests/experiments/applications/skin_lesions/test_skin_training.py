"""Batches, one small training, and the committed results with the tables made of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.applications.skin_lesions import run
from experiments.applications.skin_lesions.isic import Dataset
from experiments.applications.skin_lesions.photographs import DEVIATION, MEAN
from experiments.applications.skin_lesions.preparing import (
    classified,
    examples_of,
    outlined,
    standardized_pixels,
    training_batches,
    turned,
)
from experiments.applications.skin_lesions.training import Predict, Settings, Task, segmentation
from experiments.readme import inserted
from models.train import Batch, TrainState, cross_entropy, make_step


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


def mean_colours(dataset: Dataset) -> Task:
    """A network of one layer, on the mean colour of a photograph."""
    settings, width = Settings(8, 6, 20, 1, 0.1, None), len(dataset.classes)

    def logits(params: Any, image: Any) -> Any:
        return image.mean((1, 2)) @ params

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        return cross_entropy(logits(params, batch["image"]), batch["label"]), batch_stats

    def predict(state: TrainState) -> Predict:
        def shares(images: Any) -> dict[str, Any]:
            told = jax.nn.softmax(logits(state.params, standardized_pixels(images)))
            return dict(zip(dataset.classes, told.T, strict=True))

        return shares

    params = jnp.zeros((3, width))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, settings.optimizer.init(params))
    batch = {"image": jnp.zeros((6, 8, 8, 3)), "label": jnp.zeros(6, jnp.int32)}
    return Task(settings, (make_step(loss, settings.optimizer), (state, batch)), classified(8), predict)


def test_from_photographs_to_a_detector(dataset: Dataset, tmp_path: Path) -> None:
    """A training whose detector tells elsewhere what it tells here; and what is written down of it can be read."""
    found, deployment = run.classes(dataset, mean_colours(dataset), tmp_path / "detector.bin")
    assert found.steps == 20 and found.planner == "none" and found.device_bytes == found.plain_bytes
    assert found.first_loss == pytest.approx(np.log(7)) and found.last_loss < found.first_loss
    assert found.losses_off == 0
    assert deployment.photographs == deployment.same == 6 and deployment.off == 0
    assert deployment.accuracy == found.scores["balanced accuracy"]
    table = run.by_training([found]) + run.by_deployment(deployment)
    assert f"| {found.first_loss:.2f} to {found.last_loss:.2f} |" in table


@pytest.mark.slow
def test_masks_are_learnt_and_scored(dataset: Dataset) -> None:
    """A U-Net of a single level tells dark from bright in a few steps."""
    found = run.outlines(dataset, segmentation(Settings(16, 6, 40, 4, 0.1, None), levels=1))
    assert found.last_loss < 0.8 * found.first_loss
    assert 0.3 < found.scores["Jaccard"] < found.scores["Dice"] < 1


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
