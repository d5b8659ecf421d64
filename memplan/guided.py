"""Compile a step whose collectives should hide: the second time, XLA's scheduler knows what every instruction takes.

By itself it guesses, from the size of a message alone, and lets collectives wait. What they take on these links, and
what the kernels beside them take, is known from the first compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.xla.target import Executable, Target
from memplan.program.trace import Program
from memplan.xla.traffic import Traffic, traffic


def compiled(
    program: Program, target: Target, step: Any, args: Any, kwargs: Any, flags: Mapping[str, Any] | None, **more: Any
) -> tuple[Executable, Traffic | None]:
    """The step for a target, and its replay: of two schedules the faster, unless it takes more than the memory."""
    more = {**more, "spmd": program.spmd}
    topology = program.spmd.topology if program.spmd else None
    first = target.compile(step, args, kwargs, program.options, flags, **more)
    told = traffic(first.text, target.device, topology) if target.is_gpu else None
    if told is None or not told.collectives:
        return first, told
    second = target.compile(step, args, kwargs, program.options, flags, profile=told.seconds, **more)
    retold = traffic(second.text, target.device, topology)
    faster = retold.step_s < told.step_s and second.memory.device_bytes <= target.device.memory_bytes
    return (second, retold) if faster else (first, told)
