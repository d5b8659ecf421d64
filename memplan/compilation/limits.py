"""Bytes that a step may take, and what is left free of them."""

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
        """Bytes beyond the limits."""
        return max(device_bytes - self.device_bytes, 0) + max(host_bytes - self.host_bytes, 0)


@dataclass(frozen=True)
class Headroom:
    """Bytes of the limits that a plan leaves free, since earlier compilations took more than was predicted."""

    device_bytes: int = 0
    host_bytes: int = 0

    def plus_overshoot(self, limits: Limits, device_bytes: int, host_bytes: int) -> Headroom:
        """This, and what a compilation that took these bytes exceeded the limits by."""
        return Headroom(
            self.device_bytes + max(0, device_bytes - limits.device_bytes),
            self.host_bytes + max(0, host_bytes - limits.host_bytes),
        )
