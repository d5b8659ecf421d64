"""What ends a search early: the user's time limit, or Ctrl-C."""

import time
from dataclasses import dataclass, field

CTRL_C = "Ctrl-C"
TIME_LIMIT = "time limit"


class DeadlinePassed(Exception):
    """The time limit has passed."""


@dataclass(frozen=True)
class Deadline:
    """The moment from which on a search begins nothing new."""

    time_limit_s: float | None = None  # from the start; None: there is no limit
    start_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def has_passed(self) -> bool:
        limit_s = self.time_limit_s
        return limit_s is not None and time.monotonic() - self.start_s >= limit_s

    def check(self) -> None:
        """Raise DeadlinePassed if it has."""
        if self.has_passed:
            raise DeadlinePassed


NEVER = Deadline()
