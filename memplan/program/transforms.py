"""Carry out the transforms of a step's program."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import (
    IndexedStacks,
    LessWorkspace,
    LoopResiduals,
    StateOnHost,
    Transform,
)
from memplan.program.loops.residuals import follow_residuals
from memplan.program.loops.stacks import follow_indexed_stacks
from memplan.program.slabs.write import follow_slabs
from memplan.program.state.host_state import offload_state
from memplan.program.trace import Applied, Program


def apply_all(program: Program, transforms: Iterable[Transform]) -> Program:
    """The program after these transforms, in order; raises like `apply`."""
    return functools.reduce(apply, transforms, program)


def apply(program: Program, transform: Transform) -> Program:
    """The program after one more transform.

    Raises:
      PlanMismatchError: the program does not have what the transform changes.
      UnsupportedProgramError: see `Program.flat`.
    """
    match transform:
        case IndexedStacks():
            return follow_indexed_stacks(program)
        case LoopResiduals():
            return follow_residuals(program, transform)
        case Slabs():
            return follow_slabs(program, transform)
        case StateOnHost():
            return offload_state(program, transform.inputs, transform.streams)
        case LessWorkspace():
            return program.transformed(Applied(transform), program.rewritten)
