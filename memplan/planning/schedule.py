"""What a plan is: actions in an order. Types, and nothing that decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does.

    Copies are asynchronous: the device's buffer is there until `OFFLOADED`, the host's from `OFFLOAD` to the last
    `PREFETCHED`, the new one on the device from `PREFETCH` on, and may be read after `PREFETCHED`.
    """

    RUN = "run"
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    PREFETCH = "prefetch"
    PREFETCHED = "prefetched"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan. Every read is served by the run or the copy that made its buffer last.

    Attributes:
      number: of the kernel that runs, loops' bodies in front of the loop; of the buffer that is copied.
    """

    kind: Kind
    number: int


Schedule = tuple[Action, ...]


def runs(numbers: Iterable[int]) -> Schedule:
    """Kernels that run one after another, and no copies."""
    return tuple(Action(Kind.RUN, number) for number in numbers)
