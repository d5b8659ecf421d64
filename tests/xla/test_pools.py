"""What XLA's pools take: measured figures, its rules, and what holds for all requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.xla.local import Pool, Taken, least_limit

MIB, GIB = 1 << 20, 1 << 30
REQUESTS = st.lists(
    st.integers(0, 40 * MIB) | st.sampled_from([2**n * MIB for n in range(9)]), max_size=30
)
POOLS = st.builds(Pool, st.integers(0, 2000 * MIB), st.booleans())


def test_what_was_measured() -> None:
    """A scalar, 13 arrays of 256 MiB, a step's temporaries: `memory_stats()` on the stand-in driver, as a V100."""
    requests = [4, *[256 * MIB] * 13, 4026580228, 4]
    assert Pool(12696158208, grows=True).take(requests) == Taken(7516241920, 8592031744)


@pytest.mark.parametrize(
    ("requests", "taken"),
    [
        ([1], Taken(256, 2 * MIB)),  # the first region
        # the next power of two; less than 128 MiB is not split off
        ([1000 * MIB], Taken(1024 * MIB, 1024 * MIB)),
        ([800 * MIB], Taken(800 * MIB, 1024 * MIB)),
        # a rest that is as large as the request serves the next
        ([30 * MIB] * 2, Taken(64 * MIB, 64 * MIB)),
        ([33 * GIB], Taken(33 * GIB, 64 * GIB)),
        ([40 * GIB, 20 * GIB], Taken(60 * GIB, 64 * GIB)),
        # 53 of 64 GiB: the second half is too small
        ([GIB] * 20 + [33 * GIB], Taken(20 * GIB, 32 * GIB, 33 * GIB)),
        ([65 * GIB], Taken(0, 0, 65 * GIB)),
        ([0], Taken(0, 0)),
    ],
)
def test_regions_and_chunks(requests: list[int], taken: Taken) -> None:
    assert Pool(64 * GIB, grows=True).take(requests) == taken


def test_what_does_not_grow_is_taken_whole() -> None:
    assert Pool(16 * GIB, grows=False).take([GIB] * 3) == Taken(3 * GIB, 16 * GIB)


@given(POOLS, REQUESTS)
def test_nothing_is_given_twice_or_beyond_the_limit(pool: Pool, requests: list[int]) -> None:
    usage = pool.take(requests)
    assert usage.in_use_bytes <= usage.pool_bytes <= pool.limit_bytes
    if usage.refused_nbytes is None:
        assert usage.in_use_bytes >= sum(requests)
    else:  # it is what there is no room for behind the last region
        assert usage.refused_nbytes > pool.limit_bytes - usage.pool_bytes - 256
        assert any(0 <= usage.refused_nbytes - request < 256 for request in requests)


@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=10))
def test_the_least_limit_serves_and_one_less_does_not(requests: list[int]) -> None:
    units = least_limit(requests, MIB)
    assert Pool(units * MIB, grows=True).take(requests).refused_nbytes is None
    assert Pool((units - 1) * MIB, grows=True).take(requests).refused_nbytes is not None
