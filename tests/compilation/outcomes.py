"""Outcomes as if XLA had compiled a small program into so many bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp

from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.hardware.backend import GPU
from memplan.planning.slabs.slabs import Slabs
from memplan.program.trace import InSlabs, Program, trace
from memplan.xla.target import Executable, Memory

LIMITS = Limits(100, 50)
PROGRAM = trace(lambda x: x + 1, (jax.ShapeDtypeStruct((4,), jnp.float32),), {}, {})


def in_slabs(on_host: bool = False) -> Program:
    """The program, as if its op ran in slabs of two rows."""
    slabs = Slabs(0, 0, 2, frozenset({0}), frozenset({1}), frozenset({1} if on_host else ()))
    return PROGRAM.transformed(InSlabs(slabs, cast(Any, None), 0, ()), None)


def outcome(
    program: Program,
    nbytes: int,
    host_bytes: int = 0,
    predicted_to_fit: bool = True,
    seconds: float = 1.0,
    waits_s: float = 0.0,
    bound_s: float = 1.0,
    unplanned_s: float | None = None,
    kernels: int = 1,
    workspace_bytes: int = 0,
    slower_s: float = 0.0,
) -> Outcome:
    """An outcome with these bytes and seconds; its plain module has 500 bytes.

    Args:
      predicted_to_fit: whether the plan was predicted to take 100 bytes at most.
      unplanned_s: of the plain module; by default those of the plan.
      kernels: of the plain module.
      workspace_bytes: the largest of a convolution.
      slower_s: of the plain module's seconds, for less workspace.
    """
    executable = Executable(None, Memory(nbytes, host_bytes, nbytes))
    replay = SimpleNamespace(step_s=seconds, copy_s=waits_s, hidden_copy_s=0.0, actions=1)
    unplanned_s = seconds if unplanned_s is None else unplanned_s
    unplanned = SimpleNamespace(step_s=unplanned_s, slower_s=slower_s)
    problem = SimpleNamespace(kernels=range(kernels))
    plain = SimpleNamespace(
        device_bytes=500,
        resident_bytes=10,
        replay=unplanned,
        problem=problem,
        largest_workspace_bytes=workspace_bytes,
        workspaces={},
    )
    result = SimpleNamespace(replay=replay)
    facts = {
        "fits": predicted_to_fit,
        "plain": plain,
        "plan": None,
        "result": result,
        "bound_s": bound_s,
    }
    predicted = min(nbytes, LIMITS.device_bytes) if predicted_to_fit else nbytes
    predictions = {"predicted_bytes": predicted, "predicted_host_bytes": host_bytes}
    planned = cast(Any, SimpleNamespace(**facts, **predictions))
    target = cast(Any, SimpleNamespace(device=SimpleNamespace(name="v100"), backend=GPU))
    return Outcome(program, target, LIMITS, planned, False, executable=executable)
