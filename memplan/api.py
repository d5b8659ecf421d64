"""`memplan.jit`, and functions that plan a step several times to answer a question."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypedDict, Unpack, overload

from memplan import pipeline
from memplan.hardware.topology import Topology
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.report.comparison import Comparison
from memplan.report.curve import Curve
from memplan.report.diagnosis import Diagnosis
from memplan.report.frontier import Frontier
from memplan.report.model import Report
from memplan.request import UNLIMITED, Request, limits_of
from memplan.stages import PlannedJit, notify, telling
from memplan.studies.compare import compare as compare_methods
from memplan.studies.curve import curve as curve_of
from memplan.studies.doctor import doctor as doctor_of
from memplan.studies.largest import Make
from memplan.studies.largest import frontier as frontier_of
from memplan.units import Size, parse_bytes

__all__ = [
    "compare",
    "curve",
    "doctor",
    "frontier",
    "jit",
    "largest",
    "parse_bytes",
    "progress",
    "report",
]


class PlanOptions(TypedDict, total=False):
    """Options of every function that plans; `jit` documents them."""

    host_budget: Size
    device: str | None
    planner: str | Planner | None
    split: str | bool
    topology: Topology | str | None
    between_hosts: str | None
    pin: Mapping[str, str] | None
    keep_unused: bool
    compiler_options: Mapping[str, Any] | None
    time_limit: float | None


class RequestOptions(PlanOptions, total=False):
    """Also options that name arguments by position."""

    host_state: int | Sequence[int]
    donate_argnums: int | Sequence[int] | None
    in_shardings: Any
    out_shardings: Any


class StepOptions(PlanOptions, total=False):
    """Also options of a step that will run, from `jit` or the jit of a library."""

    plan: Plan | None
    verify: str | None


class JitOptions(RequestOptions, StepOptions, total=False):
    """Options of `jit`: also those of `jax.jit`."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnames: str | Sequence[str] | None


@contextlib.contextmanager
def progress(callback: pipeline.Notify) -> Iterator[None]:
    """Call `callback(stage, fraction or None)` for each stage of planning inside the block.

    Without it, a terminal shows the stage on standard error if planning takes longer than two
    seconds. The logger `memplan` has the stages and outcomes (INFO) and the programs tried (DEBUG).

    Example:
      >>> import jax, jax.numpy as jnp, memplan
      >>> stages = []
      >>> with memplan.api.progress(lambda stage, fraction: stages.append(stage)):
      ...     planned = memplan.jit(jnp.sum).plan(jax.ShapeDtypeStruct((64,), jnp.float32))
      >>> len(stages) > 0
      True
    """
    token = notify.set(callback)
    try:
        yield
    finally:
        notify.reset(token)


class Decorator(Protocol):
    """`jit` with its options: makes a planned step of a function."""

    def __call__[**P, R](self, step: Callable[P, R], /) -> PlannedJit[P, R]: ...


@overload
def jit[**P, R](
    step: Callable[P, R], *, budget: Size = None, **options: Unpack[JitOptions]
) -> PlannedJit[P, R]: ...
@overload
def jit(*, budget: Size = None, **options: Unpack[JitOptions]) -> Decorator: ...
def jit(
    step: Callable[..., Any] | None = None,
    *,
    budget: Size = None,
    **options: Unpack[JitOptions],
) -> Any:
    """`jax.jit` with a device-memory budget.

    Args:
      step: the function; omit it to use `jit` as a decorator with arguments.
      budget: device bytes: an int, `"16GiB"`, `"80%"` of the device's memory, or None for all
        that a process of jax has. On a device that is not here, that is 75 % of its memory, or what
        `XLA_CLIENT_MEM_FRACTION` says.
      host_budget: host bytes for offloaded values, in the same forms; a share or None refers to the
        host's memory (for a described GPU: to twice its own memory). Ignored on a CPU.
      device: the device to plan for, by name (`memplan devices`); None is the local backend. A plan
        belongs to one device: a call on this machine plans again for the local backend, within
        the same number of bytes.
      planner: an object with a `name` and a `plan` (`memplan.planning.registry.Planner`); None is
        memplan's own planner.
      plan: a saved plan to follow instead of planning.
      verify: `"compile"` (the default) lets the compiler measure the plan; `"numbers"` also
        compares the outputs with those of the unmodified step; None takes the first plan, whether
        or not the compiled step fits.
      host_state: positions of arguments whose large leaves (from 1 MiB) stay in host memory, during
        and between steps. Each is copied to the device where the step reads it; an output that
        takes a donated leaf's buffer is copied back. Pass what `Planned.place` returns.
      split: `"auto"` (the default) runs a step in slabs if it does not fit otherwise: in loops over
        blocks of rows along an axis that its large arrays have in common, such as the depth of a
        volume or the tokens of a batch. Such a step has other kernels, and the last digits of its
        results may differ. False: the step is never split.
      topology: hosts and devices of a step that runs on several, such as `"2x4"` for two hosts of
        four: a shape, a name (`memplan topology`) with or without a shape (`"ddl@2x4"`), a file, or
        a `Topology`. By default, a described GPU has up to eight of its kind on a host; on this
        machine, jax's processes are the hosts.
      between_hosts: `"bfloat16"` or `"float16"` sends sums of float32 between hosts in that type,
        with half as many bytes; each host's part is rounded once when it is sent and once when it
        is returned. None sends them unchanged.
      pin: where to keep the values that `jax.ad_checkpoint.checkpoint_name` names, from the kernel
        that computes them until the backward pass reads them. A mapping from names to `"device"`
        (never copied, never recomputed), `"host"` (copied there and back, even if the budget does
        not need it; on a CPU the same as `"device"`) or `"recompute"` (computed again from other
        values). The planner decides about all other values. A value that XLA computes inside the
        kernels that read it is never stored, and the report says so.
      time_limit: seconds of wall time, from when the step is traced, after which memplan looks for
        no better program and takes the best that fits (`Report.ended_by` says so). It is checked
        between programs: what XLA or the planner has begun is finished, the first program is always
        planned, and the best is compiled after the limit. The plan then depends on how fast the
        machine is; without a limit (None) it does not. A step that runs in several processes takes
        none.
      options: the options of `jax.jit`: `donate_argnums`, `donate_argnames`, `static_argnums`,
        `static_argnames`, `in_shardings`, `out_shardings`, `keep_unused`, `compiler_options`.

    Returns:
      A callable like `jax.jit`'s, with `plan(*args, **kwargs)` and `report`.

    Raises:
      BudgetError, UnknownDeviceError: at once, if the request is invalid.
      InfeasibleBudgetError: when the step is called or planned, if no plan fits.
      TimeLimitError: likewise, if the time limit passes before a program that fits is found.
      MemplanError, UnsupportedProgramError: likewise, if `pin` names no value of the step, or if it
        cannot be followed.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> @memplan.jit(budget="1MiB", donate_argnums=0)
      ... def step(w, x):
      ...     return w - 0.1 * jnp.tanh(x @ w).mean(), x.sum()
      >>> w, total = step(jnp.ones((8, 8)), jnp.ones((16, 8)))  # plans, compiles, runs
      >>> step.report.compiled_peak_bytes <= 2**20
      True
    """
    if step is None:
        return functools.partial(jit, budget=budget, **options)
    refuse_no_function("memplan.jit", step)
    return PlannedJit(step, *_request("memplan.jit", JitOptions, budget, options))


def report(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: Size = None,
    **options: Unpack[JitOptions],
) -> Report:
    """The report of a step, planned within a budget or compiled without one. Runs nothing.

    Args:
      step: a plain function.
      args: arrays or `jax.ShapeDtypeStruct`s.
      budget: as for `jit`. None compiles the step unplanned, except for `host_state` and `pin`; the
        report's `budget_bytes` is then the default of `jit`, and its status is `does not fit` if
        the step takes more.
      options: as for `jit`, but by default the first of several arguments is donated: the state
        that the step replaces.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> report = memplan.api.report(lambda w, x: w + x, (jnp.ones(256), jnp.ones(256)))
      >>> report.compiled_peak_bytes  # the result takes the memory of the donated argument
      2048
    """
    if not options.keys() & {"donate_argnums", "donate_argnames"}:
        options["donate_argnums"] = (0,) if len(args) > 1 else ()
    limit = UNLIMITED if budget is None else budget
    request, jit_options = _request("memplan.api.report", JitOptions, limit, options)
    planned = PlannedJit(step, request, jit_options).plan(*args)
    if budget is not None:
        return planned.report
    limits = limits_of(replace(request, budget=None), request.target)
    peak_bytes = planned.report.compiled_peak_bytes
    fits = peak_bytes is not None and peak_bytes <= limits.device_bytes
    return replace(
        planned.report,
        budget_bytes=limits.device_bytes,
        pool_share=limits.pool_share,
        status=planned.report.status if fits else "does not fit",
    )


def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: Size = None,
    **options: Unpack[RequestOptions],
) -> Comparison:
    """Compile a step by memplan and by the methods of jax and XLA. Runs nothing.

    These are the plain step, policies of `jax.checkpoint`, and XLA's rematerialization and offload.

    Args:
      step: a plain function.
      args: arrays or `jax.ShapeDtypeStruct`s.
      budget: as for `jit`.
      options: `host_budget`, `device`, `planner`, `host_state`, `split`, `donate_argnums`,
        `in_shardings`, `out_shardings`, `keep_unused`, `compiler_options`, as for `jit`. Only
        memplan uses `planner`, `host_state` and `split`. `time_limit` is that of the whole
        comparison: it ends with the rows that are done.

    Raises:
      memplan.report.result.Interrupted: Ctrl-C ended it. It is a `KeyboardInterrupt`, and its
        `result` is the comparison with the rows that are done.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> step = lambda x: jnp.tanh(x).sum()
      >>> memplan.api.compare(step, (jnp.ones(256),), budget="1MiB").any_fits
      True
    """
    request, jit_options = _request("memplan.api.compare", RequestOptions, budget, options)
    with telling() as tell:
        return compare_methods(step, args, jit_options, request, tell)


def curve(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    points: int | Sequence[float] = 8,
    **options: Unpack[RequestOptions],
) -> Curve:
    """Step time against memory, by memplan and by the methods of jax and XLA. Runs nothing.

    memplan plans for several budgets.

    Args:
      step: a plain function.
      args: arrays or `jax.ShapeDtypeStruct`s.
      points: the budgets: shares of the plain step's bytes, or a number of budgets, evenly spaced
        between the floor and the plain step's bytes.
      options: as for `compare`, also with regard to `time_limit`.

    Raises:
      memplan.report.result.Interrupted: Ctrl-C ended it, as for `compare`.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> step = lambda x: jnp.tanh(x).sum()
      >>> curve = memplan.api.curve(step, (jnp.ones(256),), points=[1.0])
      >>> curve.save_html("curve.html")
    """
    request, jit_options = _request("memplan.api.curve", RequestOptions, None, options)
    with telling() as tell:
        return curve_of(step, args, jit_options, request, points, tell)


def doctor(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: Size = None,
    **options: Unpack[RequestOptions],
) -> Diagnosis:
    """Changes that save a step's memory, the cheapest first. Runs nothing.

    Each finding has the device bytes that the change saves and the seconds that it adds. Either the
    changed step is compiled for the same device, or arrays of the compiled step are counted.
    Changes that cost time are listed only if the step does not fit, a plan last.

    Args:
      step: a plain function, or one of `jax.jit`.
      args: arrays or `jax.ShapeDtypeStruct`s.
      budget, options: as for `compare`, but `donate_argnums` defaults to that of the step's own
        `jax.jit`.
    """
    request, jit_options = _request("memplan.api.doctor", RequestOptions, budget, options)
    with telling() as tell:
        return doctor_of(step, args, jit_options, request, tell)


def largest(
    make: Make,
    *,
    low: int,
    high: int,
    step: int = 1,
    budget: Size = None,
    **options: Unpack[RequestOptions],
) -> int:
    """The largest size whose step fits. Runs nothing; `frontier` returns more.

    Args:
      make: size -> (step, args): a plain function, and arrays or `jax.ShapeDtypeStruct`s. The
        step's memory must rise with the size.
      low, high, step: the sizes are low, low + step, ... up to high.
      budget: as for `jit`.
      options: `host_budget`, `device`, `planner`, `host_state`, `split`, `donate_argnums`, as for
        `jit`, but by default the first of several arguments is donated: the state that the step
        replaces. `time_limit` is that of the whole search: it ends with the largest size that fits
        until then, as predicted.

    Raises:
      memplan.report.result.Interrupted: Ctrl-C ended it after a size that fits. It is a
        `KeyboardInterrupt`, and its `result` is the `Frontier` of the sizes tried.
      TimeLimitError: the time limit has passed, and no size that fits was found.
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
    """The largest size whose step fits, with all sizes tried and their bytes. Runs nothing.

    Args:
      name: the name of the size.
      make, low, high, step, budget, options: as for `largest`.
    """
    request, jit_options = _request("memplan.api.frontier", RequestOptions, budget, options)
    with telling() as tell:
        return frontier_of(make, name, low, high, step, jit_options, request, tell)


def refuse_no_function(function: str, step: Any) -> None:
    """Raise TypeError for a step that cannot be called."""
    if not callable(step):
        raise TypeError(
            f"{step!r:.80} is no function that {function} could plan. Options have names: "
            "budget=..."
        )


def refuse_unknown(function: str, allowed: type, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that the TypedDict `allowed` does not have."""
    unknown = sorted(set(options) - set(allowed.__annotations__))
    if unknown:
        raise TypeError(
            f"{function} has no argument {', '.join(unknown)}; its options are budget, "
            f"{', '.join(allowed.__annotations__)}."
        )


def _request(
    function: str,
    allowed: type,
    budget: Size,
    options: Mapping[str, Any],
) -> tuple[Request, dict[str, Any]]:
    """The request, and the options of `jax.jit`.

    Raises:
      TypeError: an option is not allowed.
      BudgetError, UnknownDeviceError, MemplanError: the request is invalid.
    """
    refuse_unknown(function, allowed, options)
    request_names = {field.name for field in fields(Request)}
    request_options: dict[str, Any] = {}
    jit_options: dict[str, Any] = {}
    for name, value in options.items():
        if name in request_names:
            request_options[name] = value
        elif value is not None:
            jit_options[name] = value
    request_options["host_state"] = _positions(options.get("host_state", ()))
    return Request(budget, **request_options), jit_options


def _positions(argnums: Any) -> tuple[Any, ...]:
    """The positions in an option such as `host_state`: an int, or a sequence of them."""
    is_sequence = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    return tuple(argnums) if is_sequence else (argnums,)
