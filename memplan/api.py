"""`memplan.jit` and its stages: whoever knows `jax.jit` knows them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict, Unpack

import jax

from memplan import pipeline
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import UnsupportedProgramError, WrongProgramError
from memplan.hardware.topology import Topology
from memplan.pipeline import Request
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.program import compat
from memplan.program.jit_arguments import NnxWrites, dynamic_arguments, explain, static_arguments
from memplan.program.state.host_state import as_traced, place_argument
from memplan.report.comparison import Comparison
from memplan.report.curve import Curve
from memplan.report.frontier import Frontier
from memplan.report.model import Report
from memplan.results.execute import Runner, numbers_gate
from memplan.results.gathers import told_gathers
from memplan.results.report import report_of, status_of
from memplan.studies.compare import compare as compare_ways
from memplan.studies.curve import curve as curve_of
from memplan.studies.largest import Make
from memplan.studies.largest import frontier as frontier_of
from memplan.units import Size, parse_bytes

__all__ = [
    "Compiled", "Planned", "PlannedJit", "compare", "curve", "frontier", "jit", "largest", "parse_bytes", "progress",
    "report",
]  # fmt: skip


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of every function here that plans; `jit` says what they mean."""

    host_budget: Size
    device: str | None
    planner: str | Planner | None
    host_state: int | Sequence[int]
    split: str | bool
    topology: Topology | str | None
    between_hosts: str | None
    pin: Mapping[str, str] | None
    donate_argnums: int | Sequence[int] | None


class JitOptions(RequestOptions, total=False):
    """Options of `jit` alone; from the third on they are `jax.jit`'s own."""

    plan: Plan | None
    verify: str | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnames: str | Sequence[str] | None
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    compiler_options: Mapping[str, Any] | None


_notify: contextvars.ContextVar[pipeline.Notify] = contextvars.ContextVar("notify", default=lambda stage, share: None)


@contextlib.contextmanager
def progress(callback: pipeline.Notify) -> Iterator[None]:
    """Send the stages of planning to `callback(stage, fraction or None)` inside the block."""
    token = _notify.set(callback)
    try:
        yield
    finally:
        _notify.reset(token)


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
      A callable like `jax.jit`'s, with `plan(*args, **kwargs)`.

    Raises:
      BudgetError, UnknownDeviceError: at once, where the request makes no sense.
      InfeasibleBudgetError: when called or planned, where no plan fits.
      MemplanError, UnsupportedProgramError: likewise, where `pin` names what is not there, or cannot be kept.
    """
    if step is None:
        return functools.partial(jit, budget=budget, **options)
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
    most = pipeline.UNLIMITED if budget is None else budget
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
    return compare_ways(step, args, given, request, _notify.get())


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
    return curve_of(step, args, given, request, points, _notify.get())


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
    return frontier_of(make, name, low, high, step, donated, request, _notify.get())


def _request(function: str, known: type, budget: Size, options: Mapping[str, Any]) -> tuple[Request, dict[str, Any]]:
    """The request, and the options that are `jax.jit`'s.

    Raises TypeError for an option that is not one of `known`, and what `Request` raises.
    """
    if unknown := sorted(set(options) - set(known.__annotations__)):
        raise TypeError(
            f"{function} has no argument {', '.join(unknown)}; its options are budget, "
            f"{', '.join(known.__annotations__)}."
        )
    asked = {field.name for field in fields(Request)}
    ours = {name: value for name, value in options.items() if name in asked}
    ours["host_state"] = _positions(options.get("host_state", ()))
    given = {name: value for name, value in options.items() if name not in asked and value is not None}
    return Request(budget, **ours), given


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _checked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, which does not lose what it writes into modules."""

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        written = NnxWrites((args, kwargs))
        results = step(*args, **kwargs)
        written.check(results)
        return results

    return checked


class PlannedJit:
    """The result of `memplan.jit`: plans once per shapes, then runs."""

    def __init__(self, step: Callable[..., Any], request: Request, options: Mapping[str, Any]):
        functools.update_wrapper(self, step)
        self._step = _checked(step)
        self._request = request
        self._options = options
        self._planned: dict[Any, Planned] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._planning = threading.RLock()  # threads that call at once plan once

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A decorated method takes its instance as the first argument, as with `jax.jit`."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Planned:
        """Plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); runs nothing."""
        key = self._key(self._dynamic(args, kwargs), args, kwargs)
        with self._planning:
            if key not in self._planned:
                self._planned[key] = self._made(args, kwargs)
            return self._planned[key]

    def _made(self, args: Any, kwargs: Any) -> Planned:
        shapes = jax.tree.map(as_traced, (args, kwargs)) if self._request.holds_state else (args, kwargs)
        try:
            found = pipeline.run(self._step, shapes[0], shapes[1], self._options, self._request, _notify.get())
        except TypeError as error:
            explain(error, self._dynamic(args, kwargs))
            raise
        if self._request.verify == "numbers" and isinstance(found, Outcome):
            gate = numbers_gate(pipeline.local(found, self._request), args, kwargs)
            if not gate.passes:
                raise WrongProgramError(
                    f"the results of the planned step differ from those of the step ({gate}). Please report it."
                )
        if isinstance(found, Outcome) and (text := told_gathers(found)):
            warnings.warn(text, stacklevel=2, skip_file_prefixes=(os.path.dirname(__file__),))
        return Planned(found, self._request)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compat.is_tracing():
            return self._inline(args, kwargs)
        dynamic = self._dynamic(args, kwargs)
        key = self._key(dynamic, args, kwargs)
        if key not in self._compiled:
            with self._planning:
                self._compiled[key] = self._here.plan(*args, **kwargs).compile()
        return self._compiled[key](*dynamic[0], **dynamic[1])

    def _dynamic(self, args: Any, kwargs: Any) -> Any:
        return dynamic_arguments(self._step, args, kwargs, self._options)

    def _key(self, dynamic: Any, args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        types_of = tuple(_type_of(leaf, self._request.holds_state) for leaf in leaves)
        return tree, types_of, static_arguments(self._step, args, kwargs, self._options)

    @functools.cached_property
    def _here(self) -> PlannedJit:
        """This step, planned for the local backend within the same bytes if it was planned for an absent device."""
        target = self._request.target
        if not target.described:
            return self
        local = self._request.local(pipeline.limits_of(self._request, target).device_bytes)
        return PlannedJit(self._step, local, self._options)

    def _inline(self, args: Any, kwargs: Any) -> Any:
        """Inside another trace: the step becomes part of it, unplanned."""
        transform = compat.transform_of(jax.tree_util.tree_leaves((args, kwargs)))
        if transform is not None:
            raise UnsupportedProgramError(
                f"{transform} cannot transform a step planned by memplan.jit: the order of its kernels would be lost. "
                f"Decorate the outermost step instead, the one that calls {transform}."
            )
        warnings.warn(
            "a step planned by memplan.jit was called inside another jax.jit, scan or similar, which inlines it "
            "without a plan. Decorate the outermost step instead.",
            stacklevel=3,
        )
        return self._step(*args, **kwargs)


class Planned:
    """A step planned for its arguments' shapes, like `jax.stages.Lowered`."""

    def __init__(self, found: Outcome | Restored, request: Request):
        self._found, self._request = found, request
        self._runner: Runner | None = None
        self._compiling = threading.Lock()

    @functools.cached_property
    def _report(self) -> Report:
        return Report.from_json(self._found.report) if isinstance(self._found, Restored) else report_of(self._found)

    @property
    def report(self) -> Report:
        """The plan, its prediction and the compiler's figures; after a run also the observed peak."""
        observed = self._runner.observed_bytes if self._runner is not None else None
        return replace(self._report, observed_peak_bytes=observed)

    @property
    def plan(self) -> Plan | None:
        """The plan, to be saved; None where the step runs unmodified."""
        return self._found.plan

    def compile(self) -> Compiled:
        """Make it run on the local backend: what was planned for another device is planned again for this one."""
        with self._compiling:
            if self._runner is None:
                found = self._found
                self._runner = Runner(found if isinstance(found, Restored) else pipeline.local(found, self._request))
        return Compiled(self, self._runner)

    def place(self, argument: Any, position: int = 0) -> Any:
        """The argument at this position where the plan wants it: leaves in host memory or on the local device.

        Args:
          argument: arrays, of the structure that was planned for.
        """
        return place_argument(self._found.program, argument, position)

    def __repr__(self) -> str:
        return f"<memplan.Planned {self._found.program.name}: {status_of(self._found)}>"


class Compiled:
    """A planned step that runs, like `jax.stages.Compiled`: call it with the dynamic arguments."""

    def __init__(self, planned: Planned, run: Runner):
        self._planned = planned
        self._run = run

    @property
    def report(self) -> Report:
        return self._planned.report

    def as_text(self) -> str:
        """Scheduled HLO, as the compiler prints it."""
        return self._run.text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _type_of(leaf: Any, any_memory: bool) -> Any:
    """The type of an argument, by the quickest way: 200 arrays take 0.1 ms of every call."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        place = compat.placement_of(leaf, any_memory) if leaf.committed else None
        return aval.shape, aval.dtype, aval.weak_type, place
    if isinstance(leaf, (bool, int, float, complex)):
        aval = jax.typeof(leaf)  # to jax.jit it is an array of weak type
        return aval.shape, aval.dtype, aval.weak_type, None
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), compat.placement_of(leaf, any_memory)
    return leaf
