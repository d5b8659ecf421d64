"""The bytes that a step may take, and headroom within them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may take on the device and on the host."""

    device_bytes: int
    host_bytes: int

    def allow(self, device_bytes: int, host_bytes: int) -> bool:
        """Do these bytes fit both limits?"""
        return self.excess(device_bytes, host_bytes) == 0

    def excess(self, device_bytes: int, host_bytes: int) -> int:
        """Bytes above the limits."""
        return max(device_bytes - self.device_bytes, 0) + max(host_bytes - self.host_bytes, 0)


@dataclass(frozen=True)
class Headroom:
    """Bytes of the limits that a plan leaves free, because an earlier compilation exceeded its prediction."""

    device_bytes: int = 0
    host_bytes: int = 0

    def plus_overshoot(self, limits: Limits, device_bytes: int, host_bytes: int) -> Headroom:
        """This headroom, plus the excess of a compilation that took these bytes."""
        return Headroom(
            self.device_bytes + max(0, device_bytes - limits.device_bytes),
            self.host_bytes + max(0, host_bytes - limits.host_bytes),
        )
