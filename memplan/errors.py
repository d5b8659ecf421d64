"""The error classes of memplan."""

from typing import ClassVar


class MemplanError(Exception):
    """Base class: what happened, likely why, and what to try.

    Attributes:
      guide: `page#anchor` in `docs/guides` that explains errors of this class; the last line of
        their text. '' if there is none.
    """

    guide: ClassVar[str] = ""

    @property
    def message(self) -> str:
        """The text without the guide, even if the text quotes an error of the same class."""
        return super().__str__().removesuffix(self._last_line)

    def __str__(self) -> str:
        return self.message + self._last_line

    @property
    def _last_line(self) -> str:
        return f"\nguide: {self.guide}" if self.guide else ""


class InfeasibleBudgetError(MemplanError):
    """No plan fits the budget.

    Attributes:
      floor_bytes: the working set of the largest operation, with arguments and outputs, in bytes.
      smallest_bytes: the smallest device peak of all plans, in bytes; a budget that works.
      operation: the operation that sets the floor, with its `file:line`.
      smallest_step_s: predicted seconds of a step within `smallest_bytes`.
      baseline_step_s: those of the unmodified step; None if only a transformed one was planned.
    """

    guide = "does_not_fit#smaller-budget"

    def __init__(
        self,
        message: str,
        *,
        floor_bytes: int,
        smallest_bytes: int,
        operation: str,
        smallest_step_s: float | None = None,
        baseline_step_s: float | None = None,
    ):
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.smallest_bytes = smallest_bytes
        self.operation = operation
        self.smallest_step_s = smallest_step_s
        self.baseline_step_s = baseline_step_s


class TimeLimitError(MemplanError, TimeoutError):
    """The time limit passed before anything was found that fits.

    Attributes:
      smallest_bytes: the smallest device peak so far, in bytes.
    """

    guide = "does_not_fit#time-limit"

    def __init__(self, message: str, *, smallest_bytes: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class OutOfMemoryError(MemplanError, MemoryError):
    """A planned step could not allocate memory on the device, or pinned host memory.

    Attributes:
      needed_bytes: bytes needed in one block; None if XLA does not say.
      free_bytes: bytes of the largest free block; None if unknown.
    """

    guide = "does_not_fit#out-of-memory"

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
    ):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DeletedArgumentError(MemplanError, RuntimeError):
    """A step was called with an array that was deleted, for example by donation."""

    guide = "errors#deleted-argument"


class PlanMismatchError(MemplanError):
    """A saved plan belongs to another program, or its file is damaged."""

    guide = "errors#plan-mismatch"


class ReportError(MemplanError, ValueError):
    """A saved report is missing, is invalid, or belongs to another step or device."""

    guide = "errors#saved-report"


class UnsupportedProgramError(MemplanError):
    """The step contains something that cannot be planned; names the primitive and its line."""

    guide = "errors#unsupported-program"


class WrongProgramError(MemplanError):
    """The planned step and the step compute different results."""

    guide = "trust#numbers"


class BudgetError(MemplanError, ValueError):
    """A budget is not a size, or an environment variable of XLA's pools is not a number."""

    guide = "errors#budget"


class SizeError(MemplanError, ValueError):
    """The sizes of a step are not a range, or none can be planned."""

    guide = "errors#size"


class UnknownDeviceError(MemplanError, ValueError):
    """There is no device specification with this name, or its file is invalid."""

    guide = "errors#device"


class TopologyError(MemplanError, ValueError):
    """A topology is invalid, or does not fit the devices."""

    guide = "errors#topology"


class MeshError(MemplanError, ValueError):
    """A mesh does not fit the devices, or a batch does not fit the mesh."""

    guide = "errors#mesh"
