"""The user's step -> a traced program on the machine that runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.compilation.compiler import Notify, shapes_of
from memplan.parallel.meshes import machine_of
from memplan.parallel.step import options_with_shardings
from memplan.program.pins import check as check_pins
from memplan.program.trace import Program, trace
from memplan.request import Request, limits_of


def traced(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Program:
    """The step as a program, on the machine that runs its partitions.

    Raises:
      BudgetError, UnknownDeviceError: the request is invalid.
      MemplanError, UnsupportedProgramError: see `trace` and `check_pins`.
      TopologyError: the topology does not fit the step's devices.
    """
    target = request.target
    _ = limits_of(request, target)  # raises for an invalid request before the step is traced
    notify("tracing", None)
    args, kwargs = shapes_of(args, kwargs)
    options = options_with_shardings(step, args, kwargs, options)
    program = trace(
        step, args, kwargs, options, target.backend.platform if target.described else None
    )
    if request.pins:
        check_pins(program.traced.jaxpr, request.pins)
        program = replace(program, pins=request.pins_on_target)
    division = program.traced.division
    if division is None:
        return program
    return replace(program, machine=machine_of(division, request.topology, target.described))
