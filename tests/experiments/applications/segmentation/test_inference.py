"""Windows against a loop over voxels, and the exact facts that stitching must not disturb."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.applications.segmentation.inference import FINENESS, Windows, importance, places, sliding, whole

SIDES = st.tuples(*[st.integers(1, 7)] * 3)
OVERLAPS = st.sampled_from([0.0, 0.25, 0.5, 0.9])


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def turned_over(images: np.ndarray) -> np.ndarray:
    """A prediction that depends on where in the window a voxel lies: two channels from one."""
    return np.concatenate([images[:, ::-1, :, ::-1], images.cumsum(2)], -1)


def by_voxel(image: np.ndarray, windows: Windows) -> np.ndarray:
    """The weighted mean of all windows that see a voxel, one voxel after another; no padding."""
    shape, size = image.shape[:3], windows.size
    corners = list(places(shape, windows))
    told = {
        c: turned_over(image[tuple(slice(a, a + n) for a, n in zip(c, size, strict=True))][None])[0] for c in corners
    }
    weight = importance(windows)
    result = np.zeros((*shape, 2))
    for voxel in np.ndindex(shape):
        inside = [(c, tuple(v - a for v, a in zip(voxel, c, strict=True))) for c in corners]
        inside = [(c, at) for c, at in inside if all(0 <= a < n for a, n in zip(at, size, strict=True))]
        total = sum(weight[at] for _, at in inside)
        result[voxel] = sum(weight[at] * told[c][at].astype(float) for c, at in inside) / total
    return result


@settings(deadline=None, max_examples=40)
@given(SIDES, st.tuples(*[st.integers(0, 4)] * 3), OVERLAPS, st.integers(1, 5))
def test_against_a_loop_over_voxels(
    size: tuple[int, int, int], more: tuple[int, int, int], overlap: float, batch: int
) -> None:
    shape = tuple(n + extra for n, extra in zip(size, more, strict=True))
    image, windows = noise((*shape, 1)), Windows(size, overlap, batch=batch)
    np.testing.assert_allclose(sliding(turned_over, image, windows), by_voxel(image, windows), rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(SIDES, SIDES, OVERLAPS, st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))
def test_a_constant_comes_out_as_it_is(
    shape: tuple[int, int, int], size: tuple[int, int, int], overlap: float, constant: float
) -> None:
    """Whether the volume is larger than the window, smaller, or both."""
    found = sliding(
        lambda images: np.full((*images.shape[:-1], 3), constant, np.float32),
        np.zeros((*shape, 1), np.float32),
        Windows(size, overlap),
    )
    assert found.shape == (*shape, 3) and found.dtype == np.float32
    assert (found == np.float32(constant)).all()


@given(SIDES, st.tuples(*[st.integers(0, 12)] * 3), OVERLAPS)
def test_every_voxel_is_seen_and_windows_stay_inside(
    size: tuple[int, int, int], more: tuple[int, int, int], overlap: float
) -> None:
    shape = tuple(n + extra for n, extra in zip(size, more, strict=True))
    seen = np.zeros(shape, int)
    for corner in places(shape, Windows(size, overlap)):
        assert all(0 <= low <= extent - n for low, extent, n in zip(corner, shape, size, strict=True))
        seen[tuple(slice(low, low + n) for low, n in zip(corner, size, strict=True))] += 1
    assert seen.min() >= 1


@given(st.integers(1, 40), st.integers(0, 200), OVERLAPS)
def test_neighbours_overlap_and_are_as_few_as_can_be(side: int, more: int, overlap: float) -> None:
    starts = [corner[0] for corner in places((side + more,), Windows((side,), overlap))]
    stride = max(side * (1 - overlap), 1)
    assert starts[0] == 0 and starts[-1] == more
    assert all(b - a < stride + 1 for a, b in pairwise(starts))
    assert (len(starts) - 2) * stride < more or not more


@pytest.mark.parametrize("shape", [(6, 7, 8), (5, 3, 8), (1, 1, 1)])
def test_a_window_as_large_as_the_volume_is_the_whole_volume(shape: tuple[int, int, int]) -> None:
    image = noise((*shape, 1))
    np.testing.assert_array_equal(sliding(turned_over, image, Windows(shape)), whole(turned_over, image))


def test_a_small_volume_lies_in_the_middle_of_zeros() -> None:
    """3 voxels in a window of 6: one before, two after; 3 to a multiple of 4: none before, one after."""
    given_to = []

    def remember(images: np.ndarray) -> np.ndarray:
        given_to.append(images)
        return images

    image = noise((3, 3, 3, 2))
    np.testing.assert_array_equal(sliding(remember, image, Windows((6, 3, 3))), image)
    np.testing.assert_array_equal(whole(remember, image, multiple=4), image)
    np.testing.assert_array_equal(given_to[0][0, 1:4], image)
    np.testing.assert_array_equal(given_to[1][0, :3, :3, :3], image)
    assert [len(np.unique(images[images != 0])) for images in given_to] == [54, 54]
    assert given_to[1].shape == (1, 4, 4, 4, 2)


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_batches_change_nothing_and_are_all_of_one_size(batch: int) -> None:
    sizes = []

    def remember(images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        return turned_over(images)

    image = noise((7, 6, 5, 1))
    found = sliding(remember, image, Windows((3, 3, 3), batch=batch))
    np.testing.assert_array_equal(found, sliding(turned_over, image, Windows((3, 3, 3))))
    assert set(sizes) == {batch}


def test_weights_fall_from_the_middle_and_never_to_zero() -> None:
    """By the formula: half a side is four sigma, so that a corner would weigh exp(-8) to the third."""
    weight = importance(Windows((32, 16, 8)))
    offsets = product(*((np.arange(n) - (n - 1) / 2) / (n / 8) for n in (32, 16, 8)))
    expected = np.array([np.exp(-0.5 * (a * a + b * b + c * c)) for a, b, c in offsets]).reshape(32, 16, 8)
    np.testing.assert_allclose(weight, np.maximum(expected, 1 / FINENESS), atol=0.51 / FINENESS)
    assert weight.min() == 1 / FINENESS
    np.testing.assert_array_equal(weight, weight[::-1, ::-1, ::-1])
    assert (weight * FINENESS == np.rint(weight * FINENESS)).all()


@pytest.mark.parametrize(
    "wrong", [{"size": (0, 4, 4)}, {"size": ()}, {"overlap": 1.0}, {"overlap": -0.1}, {"sigma": 0.0}, {"batch": 0}]
)
def test_senseless_windows_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Windows need"):
        Windows(**{"size": (4, 4, 4), **wrong})  # pyright: ignore[reportArgumentType]


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="channels come last"):
        sliding(turned_over, noise((4, 4, 4)), Windows((4, 4, 4)))
    with pytest.raises(ValueError, match="all axes but the last"):
        whole(lambda images: images[:, 1:], noise((4, 4, 4, 1)))
