"""Every error that memplan raises on purpose."""

from typing import ClassVar


class MemplanError(Exception):
    """Base class: what happened, likely why, and what to try.

    Attributes:
      guide: `page#anchor` in `docs/guides` that explains errors of this class, the last line of their text; '' if there
        is none.
    """

    guide: ClassVar[str] = ""

    @property
    def message(self) -> str:
        """The text without the guide, also where it quotes an error of its class."""
        return super().__str__().removesuffix(self._last_line)

    def __str__(self) -> str:
        return self.message + self._last_line

    @property
    def _last_line(self) -> str:
        return f"\nguide: {self.guide}" if self.guide else ""


class InfeasibleBudgetError(MemplanError):
    """No plan fits the budget.

    Attributes:
      floor_bytes: working set of the largest single operation, arguments and outputs included, in bytes.
      smallest_bytes: the smallest device peak reached while planning, in bytes; a budget that works.
      operation: the operation that sets the floor, with its `file:line`.
    """

    guide = "does_not_fit#smaller-budget"

    def __init__(self, message: str, *, floor_bytes: int, smallest_bytes: int, operation: str):
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.smallest_bytes = smallest_bytes
        self.operation = operation


class OutOfMemoryError(MemplanError, MemoryError):
    """A planned step did not get the memory that it needs, on the device or of pinned host memory.

    Attributes:
      needed_bytes: in one block; None where XLA does not say.
      free_bytes: the largest block that there was; None where it is not known.
    """

    guide = "does_not_fit#out-of-memory"

    def __init__(self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DeletedArgumentError(MemplanError, RuntimeError):
    """A step was called with an array whose buffer was given away."""

    guide = "errors#deleted-argument"


class PlanMismatchError(MemplanError):
    """A saved plan does not belong to this program, or its file is damaged."""

    guide = "errors#plan-mismatch"


class ReportError(MemplanError, ValueError):
    """A saved report that is none, that belongs to another step or device, or that is missing."""

    guide = "errors#saved-report"


class UnsupportedProgramError(MemplanError):
    """The step holds something that cannot be planned; names the primitive and its line."""

    guide = "errors#unsupported-program"


class WrongProgramError(MemplanError):
    """The planned step does not compute what the step computes."""

    guide = "trust#numbers"


class BudgetError(MemplanError, ValueError):
    """A budget or a host budget that is not a size; or a variable of XLA's pools that is not a number."""

    guide = "errors#budget"


class SizeError(MemplanError, ValueError):
    """Sizes of a step that make no range, or that nothing can be planned for."""

    guide = "errors#size"


class UnknownDeviceError(MemplanError, ValueError):
    """A device name that no specification answers to."""

    guide = "errors#device"


class TopologyError(MemplanError, ValueError):
    """A topology that is not one, or that does not fit the devices that are there."""

    guide = "errors#topology"


class MeshError(MemplanError, ValueError):
    """A mesh that does not fit the devices, or a batch that does not fit the mesh."""

    guide = "errors#mesh"
