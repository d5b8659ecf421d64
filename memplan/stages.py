"""Stages of a planned step, like `jax.stages`: `PlannedJit` traces, plans, compiles and runs it."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from memplan import pipeline
from memplan.compilation.compiler import shapes_of
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import MemplanError, UnsupportedProgramError, WrongProgramError
from memplan.planning.plan import Plan
from memplan.program import compat
from memplan.program.jit_arguments import NnxWrites, dynamic_arguments, explain, static_arguments, type_of
from memplan.program.lowerable import lowerable
from memplan.program.state.host_state import as_traced, place_argument
from memplan.report.model import Report
from memplan.request import Request, limits_of
from memplan.results.execute import Runner, numbers_gate
from memplan.results.gathers import gather_warning
from memplan.results.report import report_of, status_of

__all__ = ["Compiled", "Planned", "PlannedJit", "Traced"]

notify: contextvars.ContextVar[pipeline.Notify] = contextvars.ContextVar("notify", default=lambda stage, share: None)


compat.hide_frames(os.path.dirname(__file__))


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
        functools.update_wrapper(self, step, updated=())
        self._step = _checked(step)
        self._request = request
        self._options = options
        if not isinstance(given := options.get("compiler_options") or {}, Mapping):
            raise TypeError(f"compiler_options is {given!r:.80}; it is a mapping from XLA's options to their values.")
        self._jitted: Any = jax.jit(self._step, **options)
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

    def lower(self, *args: Any, **kwargs: Any) -> Planned:
        """`plan`, by the name that `jax.jit` has for this stage."""
        return self.plan(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace for these arguments; neither plans nor runs."""
        return Traced(self, self._jitted.trace(*args, **kwargs), args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results as `jax.ShapeDtypeStruct`s; neither plans nor runs."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all traces and plans, so that the next call makes them again."""
        with self._planning:
            self._planned.clear()
            self._compiled.clear()
            vars(self).pop("_here", None)
            self._jitted.clear_cache()

    @property
    def report(self) -> Report:
        """Of the plan so far; if there are several, for several shapes, of the one with the largest arguments.

        Raises:
          MemplanError: nothing was planned yet.
        """
        plans = self._planned or self._here._planned
        if not plans:
            raise MemplanError("there is no report, since nothing was planned yet. Call the step, or plan it, first.")
        return max(plans.values(), key=lambda one: sum(one._found.program.input_nbytes)).report

    def _made(self, args: Any, kwargs: Any) -> Planned:
        shapes = jax.tree.map(as_traced, (args, kwargs)) if self._request.holds_state else (args, kwargs)
        try:
            found = pipeline.run(self._step, shapes[0], shapes[1], self._options, self._request, notify.get())
        except TypeError as error:
            explain(error, self._dynamic(args, kwargs))
            raise
        if self._request.verify == "numbers" and isinstance(found, Outcome):
            gate = numbers_gate(pipeline.local(found, self._request), args, kwargs)
            if not gate.passes:
                raise WrongProgramError(
                    f"the results of the planned step differ from those of the step ({gate}). Please report it."
                )
        if isinstance(found, Outcome) and (text := gather_warning(found)):
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
        try:
            return self._compiled[key](*dynamic[0], **dynamic[1])
        except TypeError as error:
            explain(error, dynamic)
            raise

    def _dynamic(self, args: Any, kwargs: Any) -> Any:
        return dynamic_arguments(self._step, args, kwargs, self._options)

    def _key(self, dynamic: Any, args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        types_of = tuple(type_of(leaf, self._request.holds_state) for leaf in leaves)
        return tree, types_of, static_arguments(self._step, args, kwargs, self._options)

    @functools.cached_property
    def _here(self) -> PlannedJit:
        """This step, planned for the local backend within the same bytes if it was planned for an absent device."""
        target = self._request.target
        if not target.described:
            return self
        local = self._request.local(limits_of(self._request, target).device_bytes)
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


class Stage:
    """What every stage tells of the step's arguments and results, as the stages of `jax.jit` do."""

    def __init__(self, stage: jax.stages.Traced):
        self._stage = stage

    @property
    def args_info(self) -> Any:
        """Shape, type and donation of each leaf of (args, kwargs), without the static ones."""
        return self._stage.args_info

    @property
    def in_tree(self) -> Any:
        """The structure of (args, kwargs), without the static ones."""
        return compat.in_tree_of(self._stage)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of donated leaves."""
        return self._stage.donate_argnums

    @property
    def out_tree(self) -> Any:
        """The structure of the results."""
        return self._stage.out_tree

    @property
    def out_info(self) -> Any:
        """The results as `jax.ShapeDtypeStruct`s."""
        return self._stage.out_info


class Traced(Stage):
    """A step traced for its arguments' shapes, like `jax.stages.Traced`."""

    def __init__(self, jitted: PlannedJit, stage: jax.stages.Traced, args: Any, kwargs: Any):
        super().__init__(stage)
        self._jitted = jitted
        # Of arrays only the shapes, so that a trace does not keep them alive; but numbers are compared on arrays.
        runs = jitted._request.verify == "numbers"
        self._arguments = (args, kwargs) if runs else shapes_of(args, kwargs)

    @property
    def jaxpr(self) -> Any:
        """The step's equations."""
        return self._stage.jaxpr

    @property
    def fun_name(self) -> str:
        return self._stage.fun_name

    @property
    def effects(self) -> Any:
        """The step's side effects, such as calls of Python."""
        return self._stage.effects

    def lower(self, *, lowering_platforms: Sequence[str] | None = None) -> Planned:
        """Plan it; runs nothing.

        Args:
          lowering_platforms: None; `memplan.jit(device=...)` says what is planned for.
        """
        if lowering_platforms is not None:
            raise MemplanError(f"{lowering_platforms=}: memplan plans for one device; memplan.jit(device=) names it.")
        args, kwargs = self._arguments
        return self._jitted.plan(*args, **kwargs)


class Planned(Stage):
    """A step planned for its arguments' shapes, like `jax.stages.Lowered`."""

    def __init__(self, found: Outcome | Restored, request: Request):
        super().__init__(found.program.traced.stage)
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

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """What the compiler gets, before it optimizes and memplan plans; `Compiled.as_text` has the planned kernels.

        Args:
          dialect: "stablehlo" (the default) or "hlo".
          debug_info: with the lines of the step.
        """
        return self._lowered.as_text(dialect, debug_info=debug_info)

    def cost_analysis(self) -> Any:
        """XLA's estimate for what `as_text` shows, such as its FLOPs; None for a device that is not here."""
        return None if self._found.target.described else self._lowered.cost_analysis()

    @property
    def _lowered(self) -> jax.stages.Lowered:
        target = self._found.target
        return target.lower(lowerable(self._found.program, target.is_gpu))

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Make it run on the local backend: what was planned for another device is planned again for this one.

        Args:
          compiler_options: of XLA, beside those of `memplan.jit`. Other kernels come of them, so the step is planned
            again.
        """
        if compiler_options:
            step = self._found.program.traced
            options = {**(step.options.get("compiler_options") or {}), **compiler_options}
            again = PlannedJit(step.step, self._request, {**step.options, "compiler_options": options})
            return again.plan(*step.args, **step.kwargs).compile()
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


class Compiled(Stage):
    """A planned step that runs, like `jax.stages.Compiled`: call it with the dynamic arguments."""

    def __init__(self, planned: Planned, run: Runner):
        super().__init__(run.program.traced.stage)
        self._planned = planned
        self._run = run

    @property
    def report(self) -> Report:
        return self._planned.report

    def as_text(self) -> str:
        """Scheduled HLO, as the compiler prints it."""
        return self._run.executable.text

    def memory_analysis(self) -> Any:
        """The compiler's bytes of arguments, results, temporaries and code, as `jax.stages.Compiled` gives them."""
        return self._run.executable.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's estimate for the planned kernels, such as their FLOPs, with what is recomputed."""
        return self._run.executable.compiled.cost_analysis()

    @property
    def input_shardings(self) -> Any:
        """The sharding of each leaf of (args, kwargs); None where the step does not read it."""
        return self.in_tree.unflatten(_leaves(self._run.executable.compiled.input_shardings))

    @property
    def output_shardings(self) -> Any:
        """The sharding of each leaf of the results."""
        return self.out_tree.unflatten(_leaves(self._run.executable.compiled.output_shardings))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _leaves(shardings: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(shardings, is_leaf=lambda one: one is None)
