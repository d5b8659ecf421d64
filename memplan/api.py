"""`memplan.jit`, and functions that answer questions by planning often."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict, Unpack

from memplan import pipeline
from memplan.hardware.topology import Topology
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.report.comparison import Comparison
from memplan.report.curve import Curve
from memplan.report.diagnosis import Diagnosis
from memplan.report.frontier import Frontier
from memplan.report.model import Report
from memplan.request import UNLIMITED, Request
from memplan.stages import PlannedJit, notify
from memplan.studies.compare import compare as compare_ways
from memplan.studies.curve import curve as curve_of
from memplan.studies.doctor import doctor as doctor_of
from memplan.studies.largest import Make
from memplan.studies.largest import frontier as frontier_of
from memplan.units import Size, parse_bytes

__all__ = ["compare", "curve", "doctor", "frontier", "jit", "largest", "parse_bytes", "progress", "report"]


class PlanOptions(TypedDict, total=False):
    """Keyword arguments of every function that plans; `jit` says what they mean."""

    host_budget: Size
    device: str | None
    planner: str | Planner | None
    split: str | bool
    topology: Topology | str | None
    between_hosts: str | None
    pin: Mapping[str, str] | None


class RequestOptions(PlanOptions, total=False):
    """Those that name arguments by their position, too."""

    host_state: int | Sequence[int]
    donate_argnums: int | Sequence[int] | None


class StepOptions(PlanOptions, total=False):
    """Options of a step that is planned to be run, here and through a library."""

    plan: Plan | None
    verify: str | None
    keep_unused: bool
    compiler_options: Mapping[str, Any] | None


class JitOptions(RequestOptions, StepOptions, total=False):
    """Options of `jit`; these are `jax.jit`'s own."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnames: str | Sequence[str] | None
    in_shardings: Any
    out_shardings: Any


@contextlib.contextmanager
def progress(callback: pipeline.Notify) -> Iterator[None]:
    """Send the stages of planning to `callback(stage, fraction or None)` inside the block."""
    token = notify.set(callback)
    try:
        yield
    finally:
        notify.reset(token)


def jit(step: Callable[..., Any] | None = None, *, budget: Size = None, **options: Unpack[JitOptions]) -> Any:
    """`jax.jit` with a device-memory budget.

    Args:
      step: the function; left out where this is used as a decorator with arguments.
      budget: device bytes: an int, `"16GiB"`, `"80%"` of the device's memory, or None for all of it.
      host_budget: host bytes for offloaded values, likewise; a share or None refers to the host's memory (for a
        described GPU: twice its own). Not used where the device is the CPU.
      device: what to plan for, by name (`memplan devices`); None is the local backend. A plan belongs to the device
        that it was made for: a call here plans for the local backend, within as many bytes.
      planner: an object with a `name` and a `plan` (`memplan.planning.registry.Planner`); None is memplan's own.
      plan: a saved plan to follow instead of planning.
      verify: `"compile"` (the default) lets the compiler measure the plan; `"numbers"` also compares the outputs with
        the unmodified step's; None takes the first plan, whatever the compiler says that it takes.
      host_state: positions of arguments whose large leaves (from 1 MiB) live in host memory, between and during steps.
        They are streamed in where they are read; what takes the buffers of donated ones is streamed out. Pass what
        `Planned.place` returns.
      split: `"auto"` (the default) runs slab by slab a step that does not fit otherwise: in loops over blocks of rows
        along one axis, such as the depth of a volume or the tokens of a batch, that the large arrays of a step have in
        common. Such a step has other kernels, and its last digits may differ. False: every step stays whole.
      topology: hosts and devices of a step that runs on several, such as `"2x4"` for two hosts of four: a shape, a
        name (`memplan topology`) with or without a shape (`"ddl@2x4"`), a file, or a `Topology`. By default a described
        GPU has up to eight of its kind on a host; on this machine, jax's processes are the hosts.
      between_hosts: `"bfloat16"` sends sums of float32 between hosts in that type, half as many bytes; each host's part
        is rounded once on its way there and once on its way back. None sends them as they are.
      pin: where values are that `jax.ad_checkpoint.checkpoint_name` has given a name, from the kernel that makes them
        until the backward pass reads them, by name: `"device"` (never copied, never made again), `"host"` (copied there
        and back, whether or not the budget asks for it; on a CPU as `"device"`) or `"recompute"` (made again from what
        is there). All other values are the planner's. A value that XLA computes inside of the kernels that read it is
        nowhere, and the report says so.
      options: the others are those of `jax.jit`: `donate_argnums`, `donate_argnames`, `static_argnums`,
        `static_argnames`, `in_shardings`, `out_shardings`, `keep_unused`, `compiler_options`.

    Returns:
      A callable like `jax.jit`'s, with `plan(*args, **kwargs)` and `report`.

    Raises:
      BudgetError, UnknownDeviceError: at once, where the request makes no sense.
      InfeasibleBudgetError: when called or planned, where no plan fits.
      MemplanError, UnsupportedProgramError: likewise, where `pin` names what is not there, or cannot be kept.
    """
    if step is None:
        return functools.partial(jit, budget=budget, **options)
    refuse_no_function("memplan.jit", step)
    return PlannedJit(step, *_request("memplan.jit", JitOptions, budget, options))


def report(
    step: Callable[..., Any], args: Sequence[Any], *, budget: Size = None, **options: Unpack[JitOptions]
) -> Report:
    """The report of a step as it is, whatever it takes, or planned within a budget. Nothing is run.

    Args:
      step: a plain function; args: arrays or `jax.ShapeDtypeStruct`s.
      budget: as for `jit`; None: the step as it is, but for what `host_state` and `pin` ask. Its `budget_bytes` are the
        device's memory then, and its status `does not fit` where that is too little.
      options: as for `jit`, but by default the first of several arguments is donated, the state that a step replaces.
    """
    if not options.keys() & {"donate_argnums", "donate_argnames"}:
        options["donate_argnums"] = (0,) if len(args) > 1 else ()
    most = UNLIMITED if budget is None else budget
    request, given = _request("memplan.api.report", JitOptions, most, options)
    found = PlannedJit(step, request, given).plan(*args).report
    if budget is not None:
        return found
    memory = request.target.device.memory_bytes
    fits = found.compiled_peak_bytes is not None and found.compiled_peak_bytes <= memory
    return replace(found, budget_bytes=memory, status=found.status if fits else "does not fit")


def compare(
    step: Callable[..., Any], args: Sequence[Any], *, budget: Size = None, **options: Unpack[RequestOptions]
) -> Comparison:
    """Compile a step plain, under `jax.checkpoint` policies, with XLA's rematerialization and offload, and planned.

    Args:
      step: a plain function; args: arrays or `jax.ShapeDtypeStruct`s. Nothing is run.
      budget, options: `host_budget`, `device`, `planner`, `host_state`, `split`, `donate_argnums`, as for `jit`.
        Planner, state on the host and slabs are memplan's alone: the other ways do without.
    """
    request, given = _request("memplan.api.compare", RequestOptions, budget, options)
    return compare_ways(step, args, given, request, notify.get())


def curve(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    points: int | Sequence[float] = 8,
    **options: Unpack[RequestOptions],
) -> Curve:
    """Step time against memory: the step planned for several budgets, XLA's rematerialization, `jax.checkpoint`.

    Args:
      step: a plain function; args: arrays or `jax.ShapeDtypeStruct`s. Nothing is run.
      points: budgets: how many, evenly between the floor and what the plain step takes, or as shares of the latter.
      options: as for `compare`.
    """
    request, given = _request("memplan.api.curve", RequestOptions, None, options)
    return curve_of(step, args, given, request, points, notify.get())


def doctor(
    step: Callable[..., Any], args: Sequence[Any], *, budget: Size = None, **options: Unpack[RequestOptions]
) -> Diagnosis:
    """What to do first about a step's memory, cheapest first; what costs time only if it does not fit, a plan last.

    Each finding has the device bytes that it saves and the seconds that it adds: the changed step is compiled for the
    same device, or arrays are counted in the compiled step.

    Args:
      step: a plain function, or one of `jax.jit`; args: arrays or `jax.ShapeDtypeStruct`s. Nothing is run.
      budget, options: as for `compare`; without `donate_argnums`, the step donates what its own `jax.jit` says.
    """
    request, given = _request("memplan.api.doctor", RequestOptions, budget, options)
    return doctor_of(step, args, given, request, notify.get())


def largest(
    make: Make, *, low: int, high: int, step: int = 1, budget: Size = None, **options: Unpack[RequestOptions]
) -> int:
    """The biggest size whose step fits, out of low, low + step, ... up to high. `frontier` tells more.

    Args:
      make: size -> (step, args), the step a plain function, args arrays or `jax.ShapeDtypeStruct`s. Nothing is run.
        The memory that the step needs is taken to rise with the size.
      budget, options: `host_budget`, `device`, `planner`, `host_state`, `split`, `donate_argnums`, as for `jit`, but
        `donate_argnums` is by default the first of several arguments, the state that a step replaces.

    Raises:
      InfeasibleBudgetError: not even `low` fits.
      SizeError: there is no size between `low` and `high`.
    """
    return frontier(make, low=low, high=high, step=step, budget=budget, **options).largest


def frontier(
    make: Make,
    *,
    low: int,
    high: int,
    step: int = 1,
    name: str = "size",
    budget: Size = None,
    **options: Unpack[RequestOptions],
) -> Frontier:
    """`largest` with everything that was found on the way: bytes, the first size refused and why, what was tried.

    Args:
      name: of the size. The others: as for `largest`.
    """
    request, given = _request("memplan.api.frontier", RequestOptions, budget, options)
    donated = _positions(given["donate_argnums"]) if given else None
    return frontier_of(make, name, low, high, step, donated, request, notify.get())


def refuse_no_function(function: str, step: Any) -> None:
    """Raise TypeError for a step that cannot be called."""
    if not callable(step):
        raise TypeError(f"{step!r:.80} is no function that {function} could plan. Options have names: budget=...")


def refuse_unknown(function: str, known: type, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that is not one of `known`."""
    if unknown := sorted(set(options) - set(known.__annotations__)):
        raise TypeError(
            f"{function} has no argument {', '.join(unknown)}; its options are budget, "
            f"{', '.join(known.__annotations__)}."
        )


def _request(function: str, known: type, budget: Size, options: Mapping[str, Any]) -> tuple[Request, dict[str, Any]]:
    """The request, and the options that are `jax.jit`'s; raises like `refuse_unknown` and `Request`."""
    refuse_unknown(function, known, options)
    asked = {field.name for field in fields(Request)}
    ours = {name: value for name, value in options.items() if name in asked}
    ours["host_state"] = _positions(options.get("host_state", ()))
    given = {name: value for name, value in options.items() if name not in asked and value is not None}
    return Request(budget, **ours), given


def _positions(argnums: Any) -> tuple[Any, ...]:
    return (argnums,) if isinstance(argnums, str) or not isinstance(argnums, Sequence) else tuple(argnums)
