"""What the ISIC challenges judge by: balanced accuracy and area under the ROC curve, Dice and Jaccard of masks."""

from __future__ import annotations

import numpy as np


def balanced_accuracy(labels: np.ndarray, told: np.ndarray) -> float:
    """Mean over the classes in `labels` of the share that is told right (the mean recall), in 0 to 1.

    labels, told: integers [examples].
    """
    return float(np.mean([np.mean(told[labels == label] == label) for label in np.unique(labels)]))


def area_under_roc(labels: np.ndarray, shares: np.ndarray) -> float:
    """Mean over classes of the chance that one of the class is given a larger share than one of another; ties are half.

    Mann and Whitney's statistic (Hanley and McNeil, 1982), one class against the rest. A class that all or none of
    the examples have is left out.

    labels: integers [examples]; shares: [examples, classes].
    """
    areas = []
    for label in range(shares.shape[1]):
        own, other = shares[labels == label, label], np.sort(shares[labels != label, label])
        if own.size and other.size:
            below, up_to = (np.searchsorted(other, own, side) for side in ("left", "right"))
            areas.append((below + up_to).mean() / 2 / other.size)
    return float(np.mean(areas))


def overlaps(masks: np.ndarray, told: np.ndarray) -> tuple[float, float]:
    """Dice and Jaccard (intersection over union) of boolean masks [examples, ...], means over examples.

    Where neither marks anything, both are 1.
    """
    both, sum_of_both = _count(masks & told), _count(masks) + _count(told)
    empty = sum_of_both == 0
    dice = np.where(empty, 1, 2 * both / np.maximum(sum_of_both, 1))
    jaccard = np.where(empty, 1, both / np.maximum(sum_of_both - both, 1))
    return float(dice.mean()), float(jaccard.mean())


def _count(masks: np.ndarray) -> np.ndarray:
    return masks.reshape(len(masks), -1).sum(1)
