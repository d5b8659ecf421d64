"""Scores against their definitions, one pair or one pixel at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.applications.skin_lesions.scores import area_under_roc, balanced_accuracy, overlaps

SEEDS = st.integers(0, 10_000)


def by_pairs(labels: np.ndarray, shares: np.ndarray) -> float:
    """Every pair of one of the class and one of another: who has the larger share?"""
    areas = []
    for label in range(shares.shape[1]):
        own, other = shares[labels == label, label], shares[labels != label, label]
        wins = [(a > b) + 0.5 * (a == b) for a in own for b in other]
        areas += [np.mean(wins)] if wins else []
    return float(np.mean(areas))


@given(SEEDS, st.integers(2, 40), st.integers(2, 5))
def test_area_by_pairs(seed: int, examples: int, classes: int) -> None:
    """Shares in steps of a fifth, so that many are equal; some classes may have no example."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, examples)
    labels[:2] = 0, 1
    shares = random.integers(0, 6, (examples, classes)) / 5
    assert area_under_roc(labels, shares) == pytest.approx(by_pairs(labels, shares))


def test_area_of_the_best_the_worst_and_no_opinion() -> None:
    labels = np.array([0, 0, 1, 2])
    perfect = np.eye(3)[labels]
    assert area_under_roc(labels, perfect) == 1
    assert area_under_roc(labels, -perfect) == 0
    assert area_under_roc(labels, np.ones((4, 3))) == 0.5


@given(SEEDS, st.integers(1, 40), st.integers(1, 5))
def test_balanced_accuracy_one_by_one(seed: int, examples: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    labels, told = random.integers(0, classes, (2, examples))
    recalls = []
    for label in set(labels.tolist()):
        own = [t == label for one, t in zip(labels.tolist(), told.tolist(), strict=True) if one == label]
        recalls.append(sum(own) / len(own))
    assert balanced_accuracy(labels, told) == pytest.approx(sum(recalls) / len(recalls))


def test_the_common_class_alone_is_not_enough() -> None:
    assert balanced_accuracy(np.array([0] * 9 + [1]), np.zeros(10, int)) == 0.5


@given(SEEDS, st.integers(1, 5), st.integers(1, 4))
def test_overlaps_pixel_by_pixel(seed: int, examples: int, side: int) -> None:
    masks, told = np.random.default_rng(seed).random((2, examples, side, side)) < 0.4
    dice, jaccard = [], []
    for one, other in zip(masks, told, strict=True):
        a, b = set(np.flatnonzero(one)), set(np.flatnonzero(other))
        dice.append(2 * len(a & b) / (len(a) + len(b)) if a or b else 1)
        jaccard.append(len(a & b) / len(a | b) if a or b else 1)
    assert overlaps(masks, told) == (pytest.approx(np.mean(dice)), pytest.approx(np.mean(jaccard)))
