"""What XLA's memory pools on a GPU take for what is asked of them: its BFC allocator, of the device and of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# xla/tsl/framework/bfc_allocator.{h,cc}
_ALIGNMENT = 256  # kMinAllocationSize: every size is a multiple
_FIRST_REGION_NBYTES = 2 << 20  # of a pool that grows
_LARGE_REST_NBYTES = 128 << 20  # max_internal_fragmentation_bytes_ of a pool that is given no share


@dataclass(frozen=True)
class Taken:
    """What a pool took."""

    in_use_bytes: int  # of chunks that were given out, as `bytes_in_use` has them: with what was not split off
    pool_bytes: int  # of regions, from the driver
    refused_nbytes: int | None = None  # the first request that it could not serve; None where it served all


@dataclass(frozen=True)
class Pool:
    """An empty pool."""

    limit_bytes: int  # of all its regions
    # region by region, each twice as large as the one before, or the power of two that a request needs; else the first
    # takes the whole limit
    grows: bool

    def take(self, requests: Iterable[int]) -> Taken:
        """Serve requests (bytes) in their order; none is given back."""
        free: list[int] = []
        in_use = pool = 0
        region = _rounded(min(self.limit_bytes, _FIRST_REGION_NBYTES) if self.grows else self.limit_bytes)
        for nbytes in filter(None, map(_rounded, requests)):
            if not any(chunk >= nbytes for chunk in free):
                available = (self.limit_bytes - pool) // _ALIGNMENT * _ALIGNMENT
                if nbytes > available:
                    return Taken(in_use, pool, nbytes)
                is_larger = region < nbytes
                while region < nbytes:
                    region *= 2
                free.append(min(region, available))
                pool += free[-1]
                region *= 1 if is_larger else 2
            chunk = min(chunk for chunk in free if chunk >= nbytes)
            free.remove(chunk)
            if chunk >= 2 * nbytes or chunk - nbytes >= _LARGE_REST_NBYTES:
                free.append(chunk - nbytes)
                chunk = nbytes
            in_use += chunk
        return Taken(in_use, pool)


def least_limit(requests: Iterable[int], unit_bytes: int) -> int:
    """The least limit of a pool that grows, in whole units, with which it serves the requests.

    It can be more than their sum: no request spans two regions.
    """
    asked = list(requests)
    units = -(-sum(map(_rounded, asked)) // unit_bytes)
    while Pool(units * unit_bytes, grows=True).take(asked).refused_nbytes is not None:
        units += 1
    return units


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
