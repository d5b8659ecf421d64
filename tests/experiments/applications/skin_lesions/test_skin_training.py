"""Batches, a small training, and the committed results and tables."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.applications.skin_lesions import run
from experiments.applications.skin_lesions.isic import Dataset
from experiments.applications.skin_lesions.training import (
    DEVIATION,
    MEAN,
    Task,
    balanced_accuracy,
    batches,
    overlaps,
    prepared,
    segmentation,
    standardized,
    turned,
)
from experiments.readme import inserted
from models.train import Batch, TrainState, cross_entropy, make_step


def colours(dataset: Dataset, batch: int = 6) -> Task:
    """A one-layer network on the mean colour of a photograph."""

    class Colours:
        def apply(self, variables: Any, image: Any) -> Any:
            return image.mean((1, 2)) @ variables["params"]

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        return cross_entropy(
            Colours().apply({"params": params}, batch["image"]), batch["label"]
        ), batch_stats

    optimizer = optax.sgd(0.1)
    params = jnp.zeros((3, len(dataset.classes)))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params))
    first = {"image": jnp.zeros((batch, 8, 8, 3)), "label": jnp.zeros(batch, jnp.int32)}
    built = make_step(loss, optimizer), (state, first)
    return Task(
        "colours",
        8,
        batch,
        20,
        None,
        Colours(),
        built,
        lambda lesion: np.asarray(lesion.label, np.int32),
        balanced_accuracy,
    )


def test_channels_are_standardized_in_single_precision() -> None:
    image = np.array([[[0, 128, 255]]], np.uint8)
    standard = standardized({"image": image})["image"]
    assert standard.dtype == np.float32
    np.testing.assert_allclose(
        standard[0, 0], (np.array([0, 128, 255]) / 255 - MEAN) / DEVIATION, rtol=1e-5
    )


def test_batches_are_the_same_for_one_seed(dataset: Dataset) -> None:
    lesions = dataset.lesions[:6]
    first, again, other_seed = (
        list(islice(batches(colours(dataset, 4), lesions, seed), 4)) for seed in (0, 0, 1)
    )
    for batch, two in zip(first, again, strict=True):
        assert batch["image"].shape == (4, 8, 8, 3) and batch["image"].dtype == np.float32
        assert batch["label"].shape == (4,) and batch["label"].dtype == np.int32
        np.testing.assert_array_equal(batch["image"], two["image"])
        np.testing.assert_array_equal(batch["label"], two["label"])
    assert any(
        not np.array_equal(batch["image"], two["image"])
        for batch, two in zip(first, other_seed, strict=True)
    )


def test_an_epoch_shows_every_lesion_once(dataset: Dataset) -> None:
    """Four batches of three are two epochs of six; rotations keep the mean brightness."""
    lesions, task = dataset.lesions[:6], colours(dataset, 3)
    means = [prepared(task, lesion)["image"].mean() for lesion in lesions]
    shown = [
        float(mean)
        for batch in islice(batches(task, lesions), 4)
        for mean in ((batch["image"] * DEVIATION + MEAN) * 255).mean((1, 2, 3))
    ]
    assert sorted(shown[:6]) == pytest.approx(sorted(means), abs=0.01)
    assert sorted(shown[6:]) == pytest.approx(sorted(means), abs=0.01)


def test_masks_turn_with_their_photographs() -> None:
    """All eight symmetries occur, and each acts equally on image and mask."""
    numbered = np.arange(9).reshape(3, 3)
    example = {"image": np.stack([numbered] * 3, -1), "label": numbered}
    turns = set()
    for seed in range(60):
        turned_example = turned(example, np.random.default_rng(seed))
        np.testing.assert_array_equal(turned_example["image"][..., 1], turned_example["label"])
        turns.add(turned_example["label"].tobytes())
    assert len(turns) == 8
    assert turned({"label": np.int32(3)}, np.random.default_rng(0)) == {"label": 3}


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 5))
def test_balanced_accuracy_one_by_one(seed: int, examples: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    labels, answers = random.integers(0, classes, (2, examples))
    recalls = []
    for label in set(labels.tolist()):
        own = [
            t == label
            for true_label, t in zip(labels.tolist(), answers.tolist(), strict=True)
            if true_label == label
        ]
        recalls.append(sum(own) / len(own))
    assert balanced_accuracy(labels, answers)["balanced accuracy"] == pytest.approx(
        sum(recalls) / len(recalls)
    )


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4))
def test_overlaps_pixel_by_pixel(seed: int, examples: int, side: int) -> None:
    masks = np.random.default_rng(seed).random((2, examples, side, side)) < 0.4
    dice, jaccard = [], []
    for mask, answer in zip(*masks, strict=True):
        a, b = set(np.flatnonzero(mask)), set(np.flatnonzero(answer))
        dice.append(2 * len(a & b) / (len(a) + len(b)) if a or b else 1)
        jaccard.append(len(a & b) / len(a | b) if a or b else 1)
    scores = overlaps(*masks.astype(np.int32))
    assert scores == {
        "Dice": pytest.approx(np.mean(dice)),
        "Jaccard": pytest.approx(np.mean(jaccard)),
    }


def test_from_photographs_to_scores(dataset: Dataset) -> None:
    training = run.trained(colours(dataset), dataset)
    assert (
        training["steps"] == 20
        and training["planner"] == "none"
        and training["device_bytes"] == training["plain_bytes"]
    )
    assert (
        training["first_loss"] == pytest.approx(np.log(7))
        and training["last_loss"] < training["first_loss"]
    )
    assert training["losses_off"] == 0 and list(training["scores"]) == ["balanced accuracy"]
    assert f"| {training['first_loss']:.2f} to {training['last_loss']:.2f} |" in run.table(
        [training]
    )


@pytest.mark.slow
def test_masks_are_learnt_within_a_budget(dataset: Dataset) -> None:
    """A U-Net of a single level tells dark from bright in a few steps."""
    training = run.trained(
        segmentation("240KiB", side=16, batch=6, steps=40, filters=4, levels=1), dataset
    )
    assert training["device_bytes"] <= training["budget_bytes"] < training["plain_bytes"]
    assert training["losses_off"] < 1e-4
    assert training["last_loss"] < 0.8 * training["first_loss"]
    assert 0.3 < training["scores"]["Jaccard"] < training["scores"]["Dice"] < 1


def test_results_are_within_budget() -> None:
    for row in json.loads(run.RESULTS.read_text())["trained"]:
        assert row["device_bytes"] <= row["budget_bytes"] < row["plain_bytes"]
        assert row["last_loss"] < row["first_loss"]


def test_readme_is_what_the_results_say() -> None:
    text = run.README.read_text()
    assert text == inserted(text, run.table(json.loads(run.RESULTS.read_text())["trained"]))
