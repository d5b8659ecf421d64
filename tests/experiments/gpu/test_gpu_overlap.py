"""Interval arithmetic of the overlap measurement, exact."""

from experiments.gpu.measure import overlap


def test_a_copy_beside_kernels_is_not_hidden() -> None:
    assert overlap([(0.0, 1.0)], [(1.0, 2.0)]) == 0


def test_only_the_covered_part_counts_once() -> None:
    copies = [(0.0, 4.0), (2.0, 6.0)]  # their union is 6 long
    kernels = [(1.0, 3.0), (2.5, 3.5), (5.0, 9.0)]
    assert overlap(copies, kernels) == 3.5


def test_nothing_to_hide() -> None:
    assert overlap([], [(0.0, 1.0)]) == 0
