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

    def plus_overshoot(self, limits: Limits, device_bytes: int, host_bytes: int) -> Headroom:
        """This headroom, plus the bytes by which a compilation of this size exceeds the limits."""
        return Headroom(
            self.device_bytes + max(0, device_bytes - limits.device_bytes),
            self.host_bytes + max(0, host_bytes - limits.host_bytes),
        )


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
