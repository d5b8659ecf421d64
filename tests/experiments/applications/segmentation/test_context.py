"""Phantoms whose labels need context, the patches cut from them, and trainings on both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.applications.segmentation import run
from experiments.applications.segmentation.context import BRIGHT, DARK, LABELS, draw
from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.run import Settings, cubes, random_patch
from experiments.readme import inserted
from models.unet3d import UNet3DConfig


@pytest.mark.parametrize("size", [16, 32, 47, 48, 64])
def test_no_patch_holds_both_lesion_and_marker(size: int) -> None:
    """Their voxels are at least half a volume apart along x."""
    for number in range(40):
        head = draw(size, 3, number)
        lesion, marker = np.argwhere(head.volume.label)[:, 0], np.argwhere(head.marker)[:, 0]
        assert marker.min() - lesion.max() >= size / 2
        assert set(np.unique(head.volume.label)) == {0, DARK if number % 2 else BRIGHT}


def test_the_marker_tells_the_class_and_the_lesion_does_not() -> None:
    """The class decides the marker's brightness; lesions of both have equal means and places."""
    heads = [draw(32, 0, number) for number in range(60)]
    means, middles = {BRIGHT: [], DARK: []}, {BRIGHT: [], DARK: []}
    for head in heads:
        kind = int(head.volume.label.max())
        assert (head.volume.image[head.marker].mean() > 0) == (kind == BRIGHT)
        at = head.volume.label > 0
        means[kind].append(head.volume.image[at].mean())
        middles[kind].append(np.argwhere(at).mean(0))
    assert abs(np.mean(means[BRIGHT]) - np.mean(means[DARK])) < 0.3
    np.testing.assert_allclose(np.mean(middles[BRIGHT], 0), np.mean(middles[DARK], 0), atol=1.5)


def test_a_phantom_depends_on_seed_and_number_alone() -> None:
    head, again, other_seed, later = draw(16, 1, 2), draw(16, 1, 2), draw(16, 2, 2), draw(16, 1, 4)
    np.testing.assert_array_equal(head.volume.image, again.volume.image)
    assert not np.array_equal(head.volume.image, other_seed.volume.image)
    assert not np.array_equal(head.volume.image, later.volume.image)


def test_a_patch_is_a_piece_of_its_volume() -> None:
    numbered = np.arange(10 * 11 * 12, dtype=np.float32).reshape(10, 11, 12)
    lesion = numbered.astype(np.int32) == 5 * 132 + 5 * 12 + 6
    volume, random, lesions = (
        Volume(numbered[..., None], lesion.astype(np.int32)),
        np.random.default_rng(0),
        0,
    )
    for _ in range(300):
        patch = random_patch(volume, 4, random)
        first = np.array(np.unravel_index(int(patch.image[0, 0, 0, 0]), numbered.shape))
        box = tuple(slice(low, low + 4) for low in first)
        np.testing.assert_array_equal(patch.image[..., 0], numbered[box])
        np.testing.assert_array_equal(patch.label, volume.label[box])
        lesions += patch.label.any()
    assert 1 / 3 < lesions / 300 < 1 / 2  # a third by choice, others by chance


@pytest.mark.parametrize("channels", [(), (2,)])
def test_cubes_are_all_pieces_of_a_volume(channels: tuple[int, ...]) -> None:
    volume = np.random.default_rng(0).random((6, 6, 6, *channels))
    corners = itertools.product(range(0, 6, 2), repeat=3)
    pieces = [volume[x : x + 2, y : y + 2, z : z + 2] for x, y, z in corners]
    np.testing.assert_array_equal(cubes(volume, 2), np.stack(pieces))
    np.testing.assert_array_equal(cubes(volume, 6), volume[None])


@pytest.mark.slow
@pytest.mark.parametrize("method", run.METHODS)
def test_a_training_of_few_steps(method: str) -> None:
    """Training on whole volumes in slabs gives the same loss, up to rounding."""
    settings = Settings(
        steps=6, heads=2, held_out=2, model=UNet3DConfig(1, 2, classes=64, in_channels=1)
    )
    training = run.trained(settings, method, 0)
    assert np.isfinite(training.loss) and len(training.dice) == len(LABELS)
    assert (
        min(*training.dice, training.lesion_dice) >= 0
        and max(*training.dice, training.lesion_dice) <= 1
    )
    if method == "whole":
        assert training.budget_bytes is None
    else:
        assert (
            training.budget_bytes is not None and training.compiled_bytes <= training.budget_bytes
        )
    if method == "slabs":
        assert training.loss == pytest.approx(run.trained(settings, "whole", 0).loss, rel=1e-3)


def test_results_are_within_a_quarter_of_the_whole() -> None:
    rows = run.stored_rows()
    (whole,) = {row["compiled_bytes"] for row in rows if row["way"] == "a whole volume"}
    assert all(
        row["compiled_bytes"] <= row["budget_bytes"] == whole // 4
        for row in rows
        if row["budget_bytes"]
    )


def test_readme_is_what_the_results_say() -> None:
    text = run.README.read_text()
    assert text == inserted(text, run.table(run.stored_rows()))
