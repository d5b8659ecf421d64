"""Arrays as rows of elements, with their dimensions in another order."""

import itertools
import math
from collections.abc import Iterator, Sequence


def places(sizes: Sequence[int], order: Sequence[int]) -> Iterator[int]:
    """For each place of an array with its dimensions in another order: the place it had."""
    strides = [math.prod(sizes[one + 1 :]) for one in range(len(sizes))]
    for place in itertools.product(*(range(sizes[one]) for one in order)):
        yield sum(at * strides[one] for at, one in zip(place, order, strict=True))


def canonical(dims: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions and their new order, without those of one element; those that stay side by side are one."""
    runs: list[list[int]] = []
    kept = [one for one in range(len(dims)) if dims[one] != 1]
    rank = {one: number for number, one in enumerate(kept)}
    for one in (rank[one] for one in order if one in rank):
        if runs and runs[-1][-1] + 1 == one:
            runs[-1].append(one)
        else:
            runs.append([one])
    inputs = sorted(runs)
    sizes = tuple(math.prod(dims[kept[one]] for one in run) for run in inputs)
    return sizes, tuple(inputs.index(run) for run in runs)


def split_at(sizes: Sequence[int], order: Sequence[int], chunk: int) -> tuple[list[int], list[int], int]:
    """The dimensions such that the last ones have at most so many elements, a divisor of them; where those begin."""
    left, found = chunk, list(sizes)
    for dim in reversed(range(len(sizes))):
        shared = math.gcd(found[dim], left)
        if shared == found[dim]:
            left //= shared
            continue
        if shared == 1:
            return found, list(order), dim + 1
        found[dim : dim + 1] = [found[dim] // shared, shared]
        turn = [place for one in order for place in ((one, one + 1) if one == dim else (one + (one > dim),))]
        return found, turn, dim + 1
    return found, list(order), 0


def movable(sizes: Sequence[int], order: Sequence[int], most: int) -> int:
    """How many leading dimensions lie side by side in the source and have no more elements than this."""
    found = 0
    for count in range(1, len(order) + 1):
        first = order[:count]
        if max(first) - min(first) + 1 == count and math.prod(sizes[one] for one in first) <= most:
            found = count
    return found
