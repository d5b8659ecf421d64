"""Which gradients are reduced together: the consecutive buckets of which the last one is done earliest.

One stream sends the buckets in order. A large bucket pays for one start, a small one starts early.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np


def contiguous_buckets(
    ready_s: Sequence[float],
    nbytes: Sequence[int],
    seconds: Callable[[int], float],
    largest_nbytes: int | None = None,
) -> tuple[range, ...]:
    """The buckets of consecutive gradients that are all sent earliest; of such, one with the fewest buckets.

    With a given number of buckets, the earlier the first gradients are sent the earlier all can be, so one time per
    prefix and number is all that counts. It holds for any `seconds`, monotonic or not.

    Args:
      ready_s: when each gradient is made; ascending.
      nbytes: of each gradient.
      seconds: bytes -> seconds that the stream takes to send them; called once per size.
      largest_nbytes: of a bucket with several gradients; a gradient that is larger is sent alone.
    """
    count = len(ready_s)
    if not count:
        return ()
    costs = _costs(nbytes, seconds, math.inf if largest_nbytes is None else largest_nbytes)
    earliest = _earliest_end(ready_s, costs)
    done, last = np.full(count + 1, math.inf), []  # with exactly so many buckets; where the last one starts
    done[0] = 0.0
    while done[count] > earliest:
        ends = np.maximum(done[:-1, None], np.asarray(ready_s)) + costs
        last.append(ends.argmin(axis=0))
        done = np.concatenate(([math.inf], ends.min(axis=0)))
    stops = [count]
    for starts in reversed(last):
        stops.append(int(starts[stops[-1] - 1]))
    return tuple(itertools.starmap(range, itertools.pairwise(reversed(stops))))


def _earliest_end(ready_s: Sequence[float], costs: np.ndarray) -> float:
    """When all gradients can be sent, with any number of buckets."""
    done = np.zeros(len(ready_s) + 1)
    for stop, ready in enumerate(ready_s, start=1):
        done[stop] = (np.maximum(done[:stop], ready) + costs[:stop, stop - 1]).min()
    return float(done[-1])


def _costs(nbytes: Sequence[int], seconds: Callable[[int], float], largest_nbytes: float) -> np.ndarray:
    """Seconds of the bucket from one gradient (row) to another (column); endless where there is no such bucket."""
    seconds_of = functools.cache(seconds)
    costs = np.full((len(nbytes), len(nbytes)), math.inf)
    for first in range(len(nbytes)):
        for final, total in enumerate(itertools.accumulate(nbytes[first:]), start=first):
            if total > largest_nbytes and final > first:
                break
            costs[first, final] = seconds_of(total)
    return costs
