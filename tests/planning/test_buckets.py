"""Buckets: no others of few gradients are sent earlier, and none as early are fewer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from memplan.planning.buckets import contiguous_buckets


def affine(nbytes: int) -> float:
    """A start of 4 s and a byte a second."""
    return 4.0 + nbytes


def all_divisions(count: int) -> Iterator[tuple[range, ...]]:
    for inner in range(1 << max(0, count - 1)):
        ends = [place + 1 for place in range(count - 1) if inner >> place & 1]
        yield tuple(itertools.starmap(range, itertools.pairwise([0, *ends, count])))


def last_end(
    parts: Sequence[range], ready: Sequence[float], nbytes: Sequence[int], seconds: Callable[[int], float]
) -> float:
    """Event by event, written again."""
    now = 0.0
    for part in parts:
        while now < ready[part[-1]]:
            now = float(ready[part[-1]])
        now += seconds(sum(nbytes[place] for place in part))
    return now


@pytest.mark.parametrize("seed", range(120))
def test_no_buckets_are_sent_earlier_or_as_early_and_fewer(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 9)
    ready = sorted(chance.randint(0, 12) for _ in range(count))
    nbytes = [chance.randint(0, 4) for _ in range(count)]
    largest = chance.choice([None, 0, 3, 8])
    # Any times will do: with a start, and larger buckets sometimes quicker.
    seconds = {size: float(chance.choice([2 + size, chance.randint(0, 9)])) for size in range(4 * 9 + 1)}.__getitem__
    allowed = [
        parts
        for parts in all_divisions(count)
        if largest is None or all(len(part) == 1 or sum(nbytes[part.start : part.stop]) <= largest for part in parts)
    ]
    best = min((last_end(parts, ready, nbytes, seconds), len(parts)) for parts in allowed)
    found = contiguous_buckets(ready, nbytes, seconds, largest)
    assert found in allowed
    assert (last_end(found, ready, nbytes, seconds), len(found)) == best


def test_what_is_ready_at_once_goes_at_once() -> None:
    assert contiguous_buckets([1.0, 1.0, 1.0], [5, 6, 7], affine) == (range(3),)


def test_what_is_far_apart_goes_apart() -> None:
    assert contiguous_buckets([0.0, 100.0, 200.0], [50, 50, 50], affine) == (range(1), range(1, 2), range(2, 3))


def test_as_early_in_one_bucket_is_one_bucket() -> None:
    assert contiguous_buckets([0.0, 10.0], [3, 0], lambda nbytes: 1.0) == (range(2),)


def test_a_bucket_may_have_a_largest_size_but_a_gradient_goes_alone_whatever_it_has() -> None:
    found = contiguous_buckets([0.0] * 4, [2, 2, 9, 2], affine, largest_nbytes=4)
    assert found == (range(2), range(2, 3), range(3, 4))


def test_nothing_is_in_no_bucket() -> None:
    assert contiguous_buckets([], [], affine) == ()


def test_each_size_is_asked_for_once() -> None:
    asked: list[int] = []

    def noted(nbytes: int) -> float:
        asked.append(nbytes)
        return affine(nbytes)

    contiguous_buckets([0.0] * 6, [2, 2, 2, 2, 2, 2], noted)
    assert sorted(asked) == [2, 4, 6, 8, 10, 12]


def test_hundreds_of_gradients_take_no_time_and_are_not_worse_than_all_or_each() -> None:
    chance = random.Random(7)
    ready = sorted(chance.random() for _ in range(400))
    nbytes = [chance.choice([256, 10**4, 10**6]) for _ in ready]

    def seconds(total: int) -> float:
        return 1e-3 + total / 1e9

    found = contiguous_buckets(ready, nbytes, seconds)
    ends = [
        last_end(parts, ready, nbytes, seconds)
        for parts in (found, (range(400),), [range(place, place + 1) for place in range(400)])
    ]
    assert ends[0] == min(ends) and ready[-1] < ends[0]
