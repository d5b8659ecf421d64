"""Phantoms whose labels need context, the patches cut from them, and how far the network sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.applications.segmentation import patches, run
from experiments.applications.segmentation.context import BRIGHT, DARK, draw
from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.patches import Settings, Way, random_patch, reach, ways
from experiments.readme import inserted
from models.unet import UNet, UNetConfig


@pytest.mark.parametrize("size", [16, 32, 47, 48, 64])
def test_no_patch_holds_both_lesion_and_marker(size: int) -> None:
    """Between any two of their voxels lies at least half a volume along x, and the whole volume reaches over."""
    for number in range(40):
        head = draw(size, 3, number)
        lesion, marker = np.argwhere(head.volume.label)[:, 0], np.argwhere(head.marker)[:, 0]
        assert marker.min() - lesion.max() >= size / 2
        assert set(np.unique(head.volume.label)) == {0, DARK if number % 2 else BRIGHT}


def test_the_marker_tells_the_class_and_the_lesion_does_not() -> None:
    """Bright or dark is the class; lesions of both classes have the same mean and place."""
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
    one, again, other, later = draw(16, 1, 2), draw(16, 1, 2), draw(16, 2, 2), draw(16, 1, 4)
    np.testing.assert_array_equal(one.volume.image, again.volume.image)
    assert not np.array_equal(one.volume.image, other.volume.image)
    assert not np.array_equal(one.volume.image, later.volume.image)


def test_a_patch_is_a_piece_of_its_volume() -> None:
    numbered = np.arange(10 * 11 * 12, dtype=np.float32).reshape(10, 11, 12)
    lesion = numbered.astype(np.int32) == 5 * 132 + 5 * 12 + 6
    volume, random, found = Volume(numbered[..., None], lesion.astype(np.int32)), np.random.default_rng(0), 0
    for _ in range(300):
        patch = random_patch(volume, 4, random)
        first = np.array(np.unravel_index(int(patch.image[0, 0, 0, 0]), numbered.shape))
        box = tuple(slice(low, low + 4) for low in first)
        np.testing.assert_array_equal(patch.image[..., 0], numbered[box])
        np.testing.assert_array_equal(patch.label, volume.label[box])
        found += patch.label.any()
    assert 1 / 3 < found / 300 < 1 / 2  # a third by choice, others by chance


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_reach_is_how_far_a_change_is_felt(levels: int) -> None:
    """On a line, with positive weights, so that nothing cancels: the least reach of any voxel to either side."""
    side = 2 ** (levels + 3)
    model = UNet(UNetConfig(levels, filters=1, classes=1, in_channels=1, norm=None), rank=1)
    one_spot_each = 1e9 * jnp.eye(side)[..., None]
    weights = jax.eval_shape(model.init, jax.random.key(0), one_spot_each)
    weights = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1 / leaf.size), weights)
    told = np.asarray(model.apply(weights, jnp.concatenate([jnp.zeros((1, side, 1)), one_spot_each])))[..., 0]
    felt = told[1:] != told[0]  # [where the spot is, where it is felt]
    seen = []
    for voxel in range(side // 2, side // 2 + 2 ** (levels - 1)):
        spots = np.flatnonzero(felt[:, voxel])
        seen += [voxel - spots[0], spots[-1] - voxel]
    assert min(seen) == reach(levels)


def test_the_network_sees_the_marker_from_every_voxel_of_the_lesion() -> None:
    """With one level less it would not."""
    settings, furthest = Settings(), 0
    for number in range(60):
        head = draw(settings.size, 5, number)
        lesion, marker = np.argwhere(head.volume.label), np.argwhere(head.marker)
        furthest = max(furthest, *(marker.max(0) - lesion.min(0)), *(lesion.max(0) - marker.min(0)))
    assert reach(settings.levels - 1) < furthest <= reach(settings.levels)


def test_ways_differ_in_what_a_step_sees_alone() -> None:
    whole, one_patch, patches_of_a_volume = ways(Settings()).values()
    assert whole.batch == one_patch.batch == 1
    assert patches_of_a_volume.batch * patches_of_a_volume.side**3 == whole.side**3
    assert one_patch.side == patches_of_a_volume.side == whole.side // 2


@pytest.mark.slow
def test_a_training_of_few_steps() -> None:
    settings = Settings(size=16, patch=8, levels=1, filters=2, steps=6, heads=2, held_out=2)
    found = run.trained(settings, "2 patches", Way(8, 2), 0)
    assert np.isfinite(found.loss) and 0 < found.loss < 3
    assert set(found.scores) == {"whole", "windows"}
    for scores in found.scores.values():
        assert len(scores.dice) == 3 and 0 <= min(*scores.dice, scores.lesion_dice) <= 1


def test_scores_are_of_the_held_out_phantoms() -> None:
    """Who finds every lesion and says that every marker is bright: Dice by hand, over all volumes together."""
    settings = Settings(size=16, patch=8, levels=2, held_out=6)
    truth = {
        draw(16, patches.HELD_OUT, n).volume.image.tobytes(): draw(16, patches.HELD_OUT, n).volume for n in range(6)
    }

    def infer(image: np.ndarray) -> np.ndarray:
        lesion = truth[image.tobytes()].label > 0
        return np.stack([~lesion, lesion, np.zeros_like(lesion)], -1).astype(np.float32)

    found = patches.score(settings, infer)
    assert found.lesion_dice == 1
    labels = np.stack([volume.label for volume in truth.values()])
    bright, lesion = (labels == BRIGHT).sum(), (labels > 0).sum()
    assert found.dice == (1, pytest.approx(2 * bright / (bright + lesion)), 0)


def test_readme_is_what_the_results_say() -> None:
    text = run.README.read_text()
    assert text == inserted(text, run.tables())


def test_every_case_was_measured() -> None:
    assert {(row.way, row.seed) for row in run.known_trainings()} == {
        (w, s) for w in ways(Settings()) for s in run.SEEDS
    }
    assert len(list(run.known_inferences())) == len(run.INFERENCES)
