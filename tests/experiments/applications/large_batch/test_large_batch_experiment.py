"""The images, one training of a few steps, and the committed results with the tables made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.applications.large_batch import run
from experiments.applications.large_batch.run import Check, Row, by_batch, by_devices, chosen, known, known_checks
from experiments.applications.large_batch.shapes import SHAPES, SIDE, draw
from experiments.applications.large_batch.training import TEST_SEED, WAYS, Outcome, Point, Settings, batches

TINY = Settings(examples=96, test_examples=64, epochs=2, warmup_epochs=1, filters=1)


def test_the_same_seed_draws_the_same_images_of_every_shape() -> None:
    images, again, others = draw(200, 3), draw(200, 3), draw(200, 4)
    assert images.image.shape == (200, SIDE, SIDE, 3) and images.image.dtype == np.float32
    assert set(images.label) == set(range(len(SHAPES)))
    np.testing.assert_array_equal(images.image, again.image)
    assert not np.array_equal(images.label, others.label)
    assert images.image.std() == pytest.approx(1, abs=1e-3)


def test_every_shape_differs_from_the_others() -> None:
    """On a grid without noise, turn or place."""
    v, u = np.mgrid[-1.2:1.2:24j, -1.2:1.2:24j]
    covered = [inside(u, v) for inside in SHAPES.values()]
    for number, one in enumerate(covered):
        assert one.any()
        assert all((one != other).mean() > 0.05 for other in covered[:number])


def test_an_epoch_shows_every_example_at_most_once() -> None:
    images = draw(50, 0)
    shown = [batch["image"] for batch in batches(images, 16, 2, seed=5)]
    assert len(shown) == 6
    epoch = np.concatenate(shown[:3]).reshape(48, -1)
    assert len(np.unique(epoch, axis=0)) == 48


@pytest.mark.slow
def test_a_training_of_few_steps(tmp_path: Path) -> None:
    point = Point("LARS, linear", 48, 0.5)
    path = tmp_path / "found.json"
    run.measure([point, replace(point, seed=1)], path, TINY, TEST_SEED)
    first, second = known(path)
    assert first.point == point and first.outcome.steps == 4
    assert first.outcome.loss is not None and 1 < first.outcome.loss < 4
    assert first.outcome.loss != second.outcome.loss
    assert {"jax", "optax", "numpy"} <= set(json.loads(path.read_text())["versions"])


def test_tables_have_means_over_seeds_and_devices_side_by_side() -> None:
    rows = [Row(Point("linear", 64, 0.1, seed), Outcome(4, 0.9 + 0.04 * seed, None, 1.0)) for seed in (0, 1)]
    assert by_batch(rows).splitlines()[2:] == ["| 64 | 4 |  | 92.0 (90.0 to 94.0) |  |  |"]
    one = Check(Point("linear", 64, 0.1), False, 0.90, (2.0, 1.0))
    four = Check(Point("linear", 64, 0.1, devices=4), False, 0.91, (2.0, 1.5))
    assert by_devices([one, four]).splitlines()[2:] == [
        "| linear | 64 | 1 |  | 0e+00 | 90.0 |",
        "| linear | 64 | 4 |  | 5e-01 | 91.0 |",
    ]


def test_the_smallest_rate_that_is_nearly_the_best_is_chosen() -> None:
    tried = ((0.1, 0.80), (0.2, 0.94), (0.4, 0.945), (0.8, 0.5))
    rows = [Row(Point("LARS, linear", 32, rate), Outcome(4, accuracy, 0.5, 1.0)) for rate, accuracy in tried]
    assert chosen(rows, "LARS, linear") == 0.2


def test_base_rates_are_those_that_the_results_choose() -> None:
    tried = known(run.RATES)
    assert {name: chosen(tried, way) for name, way in run.AT_BASE.items()} == run.BASE_RATES


def test_every_point_was_measured() -> None:
    rows = known(run.RESULTS)
    assert [row.point for row in rows] == run.points()
    assert {row.point.way for row in rows} == set(WAYS)


def test_several_devices_computed_what_one_did() -> None:
    """Up to roundings, which the training magnifies: as far as the turned batches show."""
    one, turned, several = known_checks(run.DEVICES)
    assert several.point == replace(one.point, devices=several.point.devices) and several.point.devices > 1
    np.testing.assert_allclose(several.first_losses, one.first_losses, rtol=1e-5)
    assert abs(several.accuracy - one.accuracy) < 0.01 + abs(turned.accuracy - one.accuracy)


def test_readme_is_what_the_results_say() -> None:
    assert run.README.read_text() == run.regenerate()
