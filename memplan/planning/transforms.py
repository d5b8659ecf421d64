"""The transforms of a step's program: what a plan changes before XLA compiles it.

A transform is a decision. A plan stores its transforms in the order in which they are applied, and
`program.transforms.apply` carries them out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from memplan.planning.loops import Residuals
from memplan.planning.slabs.slabs import Slabs


@dataclass(frozen=True)
class IndexedStacks:
    """Loops read their stacks by index (`program.loops.stacks`)."""

    tag: ClassVar = "indexed stacks"
    uses_host: ClassVar[bool] = False  # does the program copy between host and device for it?


@dataclass(frozen=True)
class LoopResiduals:
    """Pairs of loops keep other residuals (`program.loops.residuals`)."""

    tag: ClassVar = "residuals"

    # by pair of loops, in the order of `Program.loops`; None leaves a pair as the user wrote it
    residuals: tuple[Residuals | None, ...]
    # pairs inside a pair of loops decide for themselves what crosses those loops
    across: bool = False

    @property
    def uses_host(self) -> bool:
        """Does the program copy between host and device for it?"""
        return any(residuals.uses_host for residuals in self.residuals if residuals is not None)


@dataclass(frozen=True)
class StateOnHost:
    """Inputs are in host memory, and the outputs that take their buffers (`program.state`)."""

    tag: ClassVar = "state on the host"
    uses_host: ClassVar[bool] = True  # does the program copy between host and device for it?

    inputs: tuple[int, ...]  # positions, ascending
    streams: bool = True  # the step itself copies them to the device; False if its caller does


@dataclass(frozen=True)
class LessWorkspace:
    """Convolutions run by algorithms with less workspace (`xla.workspace`); the program stays."""

    tag: ClassVar = "less workspace"
    uses_host: ClassVar[bool] = False  # does the program copy between host and device for it?


Transform = IndexedStacks | LoopResiduals | Slabs | StateOnHost | LessWorkspace
"""A decision about a program; `Slabs` runs parts of one computation in loops over slabs."""


def inputs_on_host(transforms: Iterable[Transform]) -> tuple[int, ...]:
    """Positions of the inputs that transforms put into host memory."""
    states = (transform for transform in transforms if isinstance(transform, StateOnHost))
    return tuple(position for state in states for position in state.inputs)
