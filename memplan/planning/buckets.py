"""Choose buckets: consecutive gradients that are reduced together, such that the last bucket ends earliest.

One stream sends the buckets in order. A large bucket pays the latency once, a small one starts early.
"""

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
    """The buckets that end earliest; the fewest, if several choices do.

    Dynamic programming over prefixes of the gradients and numbers of buckets; `seconds` need not be monotonic.

    Args:
      ready_s: when each gradient is ready; ascending.
      nbytes: of each gradient.
      seconds: bytes -> seconds that the stream needs to send them; called once per size.
      largest_nbytes: limit of a bucket with several gradients; a larger gradient is sent alone.

    Raises:
      ValueError: the gradients are not in order, have no time or no size each, or `seconds` returns no time.
    """
    if len(ready_s) != len(nbytes):
        raise ValueError(f"{len(ready_s)} times and {len(nbytes)} sizes. Give one of each per gradient.")
    if not all(map(math.isfinite, ready_s)) or any(later < early for early, later in itertools.pairwise(ready_s)):
        raise ValueError(
            "the gradients are not in the order they are made. Sort them by their time, all of them finite."
        )
    if any(size < 0 for size in nbytes):
        raise ValueError(f"a gradient has {min(nbytes)} bytes. A size is 0 or more.")
    count = len(ready_s)
    if not count:
        return ()
    costs = _costs(nbytes, seconds, math.inf if largest_nbytes is None else largest_nbytes)
    earliest = np.zeros(count + 1)  # end of each prefix of the gradients, with any number of buckets
    for stop, ready in enumerate(ready_s, start=1):
        earliest[stop] = (np.maximum(earliest[:stop], ready) + costs[:stop, stop - 1]).min()
    done, last = np.full(count + 1, math.inf), []  # the same with exactly this many buckets; starts of the last bucket
    done[0] = 0.0
    while done[count] > earliest[count]:
        ends = np.maximum(done[:-1, None], np.asarray(ready_s)) + costs
        last.append(ends.argmin(axis=0))
        done = np.concatenate(([math.inf], ends.min(axis=0)))
    stops = [count]
    for starts in reversed(last):
        stops.append(int(starts[stops[-1] - 1]))
    return tuple(itertools.starmap(range, itertools.pairwise(reversed(stops))))


def _costs(nbytes: Sequence[int], seconds: Callable[[int], float], largest_nbytes: float) -> np.ndarray:
    """Seconds of the bucket from one gradient (row) to another (column); infinite if there is no such bucket."""
    seconds_of = functools.cache(seconds)
    costs = np.full((len(nbytes), len(nbytes)), math.inf)
    for first in range(len(nbytes)):
        for final, total in enumerate(itertools.accumulate(nbytes[first:]), start=first):
            if total > largest_nbytes and final > first:
                break
            costs[first, final] = seconds_of(total)
    return costs
