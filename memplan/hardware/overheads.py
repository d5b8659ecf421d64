"""What a synchronous step on many devices pays beside the roofline of its kernels and its idle links.

Each is an assumption that can be replaced by a figure of one's own machine. None is fitted to a published scaling.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from memplan.errors import OverheadError
from memplan.hardware.collectives import LAUNCH_S

LARGEST_SPREAD = 1 / 3
"""From here on a normal distribution has a time below zero within three standard deviations."""

_LARGEST_SHARE = 0.5
"""Of device memory's bandwidth that messages can take: two users of one bus get half of it each, at worst."""


_MEANING = {
    "spread": "0.015 is 1.5 %",
    "roofline_share": "0.5 for kernels that reach half of their roofline",
    "kernel_launch_s": "in seconds",
    "collective_launch_s": "in seconds",
    "accesses_per_byte": "accesses of device memory for each byte sent",
    "input_bytes": "in bytes for each device and step",
}


@dataclass(frozen=True, slots=True)
class Overheads:
    """Assumptions about a step, beyond kernels and links.

    Attributes:
      spread: standard deviation over mean of the time that one device takes for its part of a step.
      roofline_share: speed of kernels over that of their roofline.
      kernel_launch_s: seconds between the end of a kernel and the start of the next.
      collective_launch_s: seconds that a collective takes before its first byte.
      accesses_per_byte: of device memory, for each byte that a device sends to others; kernels beside them have so much
        less of its bandwidth.
      input_bytes: that each device gets in every step over the outermost links, as from a file server; 0: data lie with
        each host, or come over links of their own.
      copies_share_links: copies to and from host memory go over the same links as messages to other devices.

    Raises:
      OverheadError: one of them is not what it should be.
    """

    spread: float = 0.015
    roofline_share: float = 1.0
    kernel_launch_s: float = 0.9e-6
    collective_launch_s: float = LAUNCH_S
    accesses_per_byte: float = 3.0
    input_bytes: int = 0
    copies_share_links: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "copies_share_links" and not _is_amount(value):
                raise OverheadError(
                    f"{field.name} is {value!r}. It is a finite number, 0 or more; {_MEANING[field.name]}."
                )
        if self.spread >= LARGEST_SPREAD:
            raise OverheadError(
                f"a spread of {self.spread!r} is a third of the mean or more: a normal distribution, which is assumed "
                "of step times, would have times below zero. It is a share, as in 0.02 for 2 %."
            )
        if not 0 < self.roofline_share <= 1:
            raise OverheadError(
                f"a roofline_share of {self.roofline_share!r}: kernels reach more than nothing and at most all of "
                "their roofline. It is a share, as in 0.6; divide the simulated step by a measured one."
            )

    def kernel_s(self, roofline_s: float) -> float:
        """Seconds of a kernel on a device of mean speed, until the next one starts."""
        return roofline_s / self.roofline_share + self.kernel_launch_s

    def slowest(self, devices: int) -> float:
        """Expected time of the slowest of so many devices, over the mean.

        A synchronous step ends when the last device does (Dutta et al., Slow and Stale Gradients Can Win the Race,
        arXiv:1803.01113); times are taken as independent and normal.
        """
        return 1.0 + self.spread * expected_maximum(devices)

    def memory_share(self, sent_bytes: float, seconds: float, memory_bandwidth: float) -> float:
        """Of device memory's bandwidth, while a message of so many bytes takes so many seconds."""
        if seconds <= 0:
            return 0.0
        return min(_LARGEST_SHARE, self.accesses_per_byte * sent_bytes / seconds / memory_bandwidth)


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


NONE = Overheads(spread=0.0, kernel_launch_s=0.0, accesses_per_byte=0.0)
"""Kernels at their roofline, equally fast devices, messages that cost no memory bandwidth."""

SOURCES = {
    "spread": (
        "Sinha et al., Not All GPUs Are Created Equal (SC22, arXiv:2208.11035): 8 % variation on average between GPUs "
        "of one kind, outliers left out. Read as the distance of a box plot's whiskers, 5.4 standard deviations of a "
        "normal distribution: 1.5 %. Every step waits for the slowest (Dutta et al., arXiv:1803.01113): the expected "
        "largest of n independent normal times"
    ),
    "roofline_share": "as in all of memplan's times: kernels at the device's peak rates. Measure a step to know better",
    "kernel_launch_s": (
        "NVIDIA, Getting Started with CUDA Graphs (https://developer.nvidia.com/blog/cuda-graphs): on a V100 kernels "
        "of 2.9 us, launched one after another without waiting, come every 3.8 us"
    ),
    "collective_launch_s": (
        "assumed; NCCL's tuner has 8.4 us before the first byte of its protocol Simple (baseLatencies, "
        "https://github.com/NVIDIA/nccl, src/graph/tuning.cc)"
    ),
    "accesses_per_byte": (
        "counted: each byte of a ring is read, written where it comes in, and read again to be added or sent on. At "
        "the full rate of NVLink 4 that is 22 % of an H200's memory bandwidth; measured, kernels beside collectives "
        "are 18.9 % slower on average (Lee et al., arXiv:2507.03114)"
    ),
    "input_bytes": "none unless given: data lie with each host, or come over links of their own",
    "copies_share_links": "not unless given: in an S822LC, GPUs reach the host by NVLink and the network by PCIe",
}
"""Why each default is what it is."""


@functools.lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Of the largest of `count` independent standard normal values (David, Nagaraja: Order Statistics, 2003, 3.1).

    The integral over x > 0 of 1 - F(x)^n - F(-x)^n, where F is the normal distribution, by the midpoint rule.
    """
    if count == 1:
        return 0.0
    step, end = 1 / 256, 10.0
    return step * sum(_excess((place + 0.5) * step, count) for place in range(int(end / step)))


def _excess(x: float, count: int) -> float:
    tail = math.erfc(x / math.sqrt(2)) / 2
    return -math.expm1(count * math.log1p(-tail)) - tail**count
