"""Images, learning rates, a training of a few steps, and the committed results and table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.applications.large_batch import run
from experiments.applications.large_batch.shapes import SHAPES, SIDE, draw
from experiments.applications.large_batch.training import (
    RULES,
    ScalingRule,
    Settings,
    batches,
    matrices,
    sgd,
)
from experiments.readme import inserted

TINY = Settings(
    "448KiB", examples=96, held_out=64, epochs=2, warmup_epochs=1, base_batch=48, filters=1
)


def test_the_same_seed_draws_the_same_images_of_every_shape() -> None:
    (images, labels), (again, _), (_, other_labels) = draw(200, 3), draw(200, 3), draw(200, 4)
    assert images.shape == (200, SIDE, SIDE, 3) and images.dtype == np.float32
    assert set(labels) == set(range(len(SHAPES)))
    np.testing.assert_array_equal(images, again)
    assert not np.array_equal(labels, other_labels)
    assert images.std() == pytest.approx(1, abs=1e-3)


def test_every_shape_differs_from_the_others() -> None:
    """On a grid, without noise, rotation or shift."""
    v, u = np.mgrid[-1.2:1.2:24j, -1.2:1.2:24j]
    covered = [inside(u, v) for inside in SHAPES.values()]
    for number, mask in enumerate(covered):
        assert mask.any()
        assert all((mask != earlier).mean() > 0.05 for earlier in covered[:number])


def test_an_epoch_shows_every_example_at_most_once() -> None:
    shown = [batch["image"] for batch in batches(*draw(50, 0), batch=16, epochs=2, seed=5)]
    assert len(shown) == 6
    epoch = np.concatenate(shown[:3]).reshape(48, -1)
    assert len(np.unique(epoch, axis=0)) == 48


def test_the_rate_by_the_paper_s_own_numbers() -> None:
    """ResNet-50 on ImageNet: 0.1 for 256, so 3.2 for 8192 after five epochs, and 0 at the end."""
    imagenet = Settings(examples=1_281_167, epochs=90, warmup_epochs=5, base_batch=256)
    epoch = 1_281_167 // 8192
    rate = ScalingRule(sgd, 0.1, 1.0).rate(imagenet, 8192)
    rates = [float(rate(step)) for step in (0, 5 * epoch // 2, 5 * epoch, 90 * epoch)]
    assert rates == pytest.approx([0.1, 1.65, 3.2, 0.0], rel=1e-5, abs=1e-6)
    assert float(
        ScalingRule(sgd, 0.1, 0.5).rate(imagenet, 1024)(5 * (1_281_167 // 1024))
    ) == pytest.approx(0.2)
    assert float(ScalingRule(sgd, 0.1, None).rate(imagenet, 8192)(0)) == pytest.approx(0.1)


def test_norms_and_biases_are_no_matrices() -> None:
    params = {"kernel": np.ones((2, 2)), "bias": np.ones(2), "scale": np.ones(())}
    assert matrices(params) == {"kernel": True, "bias": False, "scale": False}


@pytest.mark.slow
def test_a_training_of_few_steps(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    run.measure([("LARS, linear", 1)], path, TINY)
    document = json.loads(path.read_text())
    assert [(row["seed"], row["batch"], row["steps"]) for row in document["rows"]] == [
        (0, 48, 4),
        (1, 48, 4),
    ]
    assert all(row["device_bytes"] <= 448 * 1024 < row["plain_bytes"] for row in document["rows"])
    assert len({row["accuracy"] for row in document["rows"]}) == 2 and all(
        row["accuracy"] < 0.5 for row in document["rows"]
    )
    assert {"jax", "optax", "numpy"} <= set(document["versions"])


def test_the_table_has_means_over_seeds() -> None:
    row = {
        "way": "linear",
        "batch": 64,
        "steps": 4,
        "plain_bytes": 3 * 2**20,
        "device_bytes": 2**20,
    }
    rows = [{**row, "seed": seed, "accuracy": 0.9 + 0.04 * seed} for seed in (0, 1)]
    assert run.table(rows).splitlines()[2:] == [
        "| 64 | 4 | 3.0 | 1.0 |  | 92.0 (90.0 to 94.0) |  |  |"
    ]


def test_every_case_was_measured_within_the_budget() -> None:
    cases = [(row["way"], row["batch"], row["seed"]) for row in run.stored_rows()]
    assert cases == [(rule, 32 * scale, seed) for rule, scale in run.CASES for seed in run.SEEDS]
    assert {rule for rule, _, _ in cases} == set(RULES)
    assert all(row["device_bytes"] <= 16 * 2**20 for row in run.stored_rows())


def test_readme_is_what_the_results_say() -> None:
    text = run.README.read_text()
    assert text == inserted(text, run.table(run.stored_rows()))
