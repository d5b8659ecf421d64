"""Limits on the bytes of a step, headroom below them, and the rank of candidates under a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most bytes that a step may use on the device and on the host."""

    device_bytes: int
    host_bytes: int
    # the share of an absent device that jax's pool would take, if that is the device's limit
    pool_share: float | None = None

    def allow(self, device_bytes: int, host_bytes: int) -> bool:
        """Whether these bytes are within both limits."""
        return self.excess(device_bytes, host_bytes) == 0

    def excess(self, device_bytes: int, host_bytes: int) -> int:
        """Bytes above the limits, summed over device and host."""
        return max(device_bytes - self.device_bytes, 0) + max(host_bytes - self.host_bytes, 0)


@dataclass(frozen=True)
class Headroom:
    """Bytes below the limits that a plan leaves unused, because a prediction was exceeded."""

    device_bytes: int = 0
    host_bytes: int = 0

    def after_miss(
        self, limits: Limits, predicted: tuple[int, int], compiled: tuple[int, int]
    ) -> Headroom:
        """The headroom for a plan whose prediction errs as much as this one's: by its error.

        The bytes beyond the limits are less than the error where a plan leaves room, and with them
        alone the same plan would be made again.

        Args:
          predicted, compiled: bytes on the device, and on the host.
        """
        return Headroom(
            _grown(self.device_bytes, limits.device_bytes, predicted[0], compiled[0]),
            _grown(self.host_bytes, limits.host_bytes, predicted[1], compiled[1]),
        )


def _grown(headroom: int, limit: int, predicted: int, compiled: int) -> int:
    if compiled <= limit:
        return headroom
    return max(headroom + compiled - limit, compiled - predicted)


Rank = tuple[bool, int, int, float]
"""The key by which `min` chooses among candidates."""

# Seconds within half a percent are a tie. The order of two plans is less sure than that: on a card,
# steps over jax.jit's took 0.87 to 1.05 times the predicted ratio (`experiments/gpu/results`).
_TIE = 1.005


def rank(fits: bool, seconds: float, nbytes: int, actions: int) -> Rank:
    """The fastest candidate that fits; if none fits, the smallest.

    Of candidates that are about equally fast, the one that does less: predicted seconds do not tell
    them apart, and each kernel and each copy may take longer than predicted.

    Args:
      actions: kernels that run, and copies.
    """
    if not fits:
        return True, nbytes, 0, 0.0
    ties = round(math.log(seconds, _TIE)) if seconds > 0 else -(1 << 30)
    return False, ties, actions, seconds
