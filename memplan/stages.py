"""The stages of a planned step, like `jax.stages`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, overload

import jax
from rich.console import Console

from memplan import pipeline
from memplan.compilation.compiler import shapes_of
from memplan.compilation.deadline import CTRL_C
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import MemplanError, UnsupportedProgramError, WrongProgramError
from memplan.planning.plan import Plan
from memplan.program import compat
from memplan.program.jit_arguments import (
    NnxWrites,
    dynamic_arguments,
    explain,
    refuse_symbols,
    static_arguments,
    type_of,
)
from memplan.program.lowerable import lowerable
from memplan.program.state.host_state import as_traced, place_argument
from memplan.report.model import Report
from memplan.report.progress import Stages
from memplan.request import Request, limits_of, traced
from memplan.results.execute import Runner, numbers_gate
from memplan.results.forms import write_forms
from memplan.results.gathers import gather_warning
from memplan.results.report import report_of, status_of
from memplan.units import format_bytes, format_seconds

__all__ = ["Compiled", "Planned", "PlannedJit", "Traced"]

_INTERRUPTED = (
    "planning was interrupted: the step has the best plan found until then, and another may be "
    "faster. Plan again for a complete search."
)
_dumps = itertools.count(1)  # folders of `MEMPLAN_DUMP` that this process has written

_log = logging.getLogger("memplan")
notify: contextvars.ContextVar[pipeline.Notify | None] = contextvars.ContextVar(
    "notify", default=None
)
"""The callback of `memplan.api.progress`."""

compat.hide_frames(os.path.dirname(__file__))


@contextlib.contextmanager
def telling() -> Iterator[pipeline.Notify]:
    """Tells the stages of planning: to the log, and to `memplan.api.progress` or else a terminal.

    In a terminal a line on standard error names the stage, after two seconds. Without one, as in a
    notebook or a job, there is the log alone.
    """
    with contextlib.ExitStack() as stack:
        callback = notify.get()
        if callback is None and sys.stderr and sys.stderr.isatty():
            callback = stack.enter_context(Stages(Console(stderr=True)))
        logged = ""

        def tell(stage: str, share: float | None) -> None:
            nonlocal logged
            if stage != logged:
                _log.info("%s", stage)
                logged = stage
            if callback is not None:
                callback(stage, share)

        yield tell


def _with_checked_writes(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step; it raises an error if what it writes into modules would be lost."""

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        writes = NnxWrites((args, kwargs))
        results = step(*args, **kwargs)
        writes.check(results)
        return results

    return checked_step


def _on_local_backend(outcome: Outcome, request: Request) -> Outcome:
    """The outcome; if it was compiled for an absent GPU, one for the local backend."""
    if not outcome.target.described:
        return outcome
    step = outcome.program.traced
    local_request = request.local(outcome.limits.device_bytes)
    local = pipeline.best(step.step, step.args, step.kwargs, step.options, local_request)
    if not local.fits:
        raise MemplanError(
            f"the step fits its budget on {outcome.target.device.name}, but not on this machine's "
            f"{local.target.device.name}, which has other kernels. Run it there, or raise the "
            "budget."
        )
    return local


class PlannedJit[**P, R]:
    """The result of `memplan.jit`: plans once per shapes, then runs.

    It is called like the step, whose parameters are `P` and whose result is `R`. `plan` and its
    like take anything in the place of arrays, as they also take shapes.

    Example:
      >>> import jax, jax.numpy as jnp, memplan
      >>> step = memplan.jit(lambda x: jnp.tanh(x).sum(), budget="1MiB")
      >>> traced = step.trace(jax.ShapeDtypeStruct((256,), jnp.float32))
      >>> planned = traced.lower()  # or step.plan(...)
      >>> compiled = planned.compile()
      >>> compiled(jnp.zeros(256)).shape
      ()
    """

    def __init__(self, step: Callable[P, R], request: Request, options: Mapping[str, Any]):
        functools.update_wrapper(self, step, updated=())
        self._step = _with_checked_writes(step)
        self._request = request
        self._options = options
        compiler_options = options.get("compiler_options") or {}
        if not isinstance(compiler_options, Mapping):
            raise TypeError(
                f"compiler_options is {compiler_options!r:.80}; it is a mapping from XLA's options "
                "to their values."
            )
        self._jitted: Any = jax.jit(self._step, **options)
        self._planned: dict[Any, Planned[R]] = {}
        self._compiled: dict[Any, Compiled[R]] = {}
        self._planning = threading.RLock()  # concurrent calls plan once

    @overload
    def __get__(self, instance: None, owner: Any = None) -> PlannedJit[P, R]: ...
    @overload
    def __get__[S, **Q](
        self: PlannedJit[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a decorated method to its instance, as `jax.jit` does."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Planned[R]:
        """Plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); runs nothing."""
        key = self._key(self._dynamic(args, kwargs), args, kwargs)
        with self._planning:
            if key not in self._planned:
                self._planned[key] = self._plan(args, kwargs)
            return self._planned[key]

    def lower(self, *args: Any, **kwargs: Any) -> Planned[R]:
        """The same as `plan`, by the name of this stage in `jax.jit`."""
        return self.plan(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced[R]:
        """Trace for these arguments; neither plans nor runs."""
        return Traced(self, self._jitted.trace(*args, **kwargs), args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results as `jax.ShapeDtypeStruct`s; neither plans nor runs."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all traces and plans; the next call traces and plans again."""
        with self._planning:
            self._planned.clear()
            self._compiled.clear()
            vars(self).pop("_local", None)
            self._jitted.clear_cache()

    @property
    def report(self) -> Report:
        """The report of the plan. Of several, for several shapes, the one with most input bytes.

        Raises:
          MemplanError: nothing was planned yet.
        """
        plans = self._planned or self._local._planned
        if not plans:
            raise MemplanError(
                "there is no report, since nothing was planned yet. Call the step, or plan it, "
                "first."
            )
        return max(
            plans.values(), key=lambda planned: sum(planned._outcome.program.input_nbytes)
        ).report

    def _plan(self, args: Any, kwargs: Any) -> Planned[R]:
        """Plan for arguments that were not planned for before."""
        request = self._request
        refuse_symbols(self._dynamic(args, kwargs))
        shapes, named_shapes = args, kwargs
        if request.holds_state:
            shapes, named_shapes = jax.tree.map(as_traced, (args, kwargs))
        try:
            with telling() as tell:
                program = traced(self._step, shapes, named_shapes, self._options, request, tell)
                outcome = pipeline.run(program, request, tell)
        except TypeError as error:
            explain(error, self._dynamic(args, kwargs))
            raise
        if isinstance(outcome, Restored):
            return Planned(outcome, request)
        sizes = outcome.device_bytes, outcome.limits.device_bytes
        _log.info(
            "%s: %s, %s of %s, %s",
            program.name,
            status_of(outcome),
            *map(format_bytes, sizes),
            format_seconds(outcome.step_s),
        )
        if request.verify == "numbers":
            gate = numbers_gate(_on_local_backend(outcome, request), args, kwargs)
            if not gate.passes:
                raise WrongProgramError(
                    f"the results of the planned step differ from those of the step ({gate}). "
                    "Please report it."
                )
        interrupted = _INTERRUPTED if outcome.ended_by == CTRL_C else ""
        for warning in filter(None, (gather_warning(outcome), interrupted)):
            package = os.path.dirname(__file__)
            warnings.warn(warning, stacklevel=2, skip_file_prefixes=(package,))
        folder = os.environ.get("MEMPLAN_DUMP")
        if folder:
            write_forms(outcome, Path(folder) / f"{next(_dumps)}-{outcome.program.name}")
        return Planned(outcome, request)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if compat.is_tracing():
            return self._inline(args, kwargs)
        dynamic = self._dynamic(args, kwargs)
        key = self._key(dynamic, args, kwargs)
        if key not in self._compiled:
            with self._planning:
                self._compiled[key] = self._local.plan(*args, **kwargs).compile()
        try:
            return self._compiled[key](*dynamic[0], **dynamic[1])
        except TypeError as error:
            explain(error, dynamic)
            raise

    def _dynamic(self, args: Any, kwargs: Any) -> Any:
        """(args, kwargs) without static arguments."""
        return dynamic_arguments(self._step, args, kwargs, self._options)

    def _key(self, dynamic: Any, args: Any, kwargs: Any) -> Any:
        """The key of a plan: trees, types and static arguments."""
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        types_of = tuple(type_of(leaf, self._request.holds_state) for leaf in leaves)
        return tree, types_of, static_arguments(self._step, args, kwargs, self._options)

    @functools.cached_property
    def _local(self) -> PlannedJit[P, R]:
        """This step for the local backend; within the same bytes, if it is for an absent device."""
        target = self._request.target
        if not target.described:
            return self
        local_request = self._request.local(limits_of(self._request, target).device_bytes)
        return PlannedJit(self._step, local_request, self._options)

    def _inline(self, args: Any, kwargs: Any) -> Any:
        """Call the step unplanned, inside another trace."""
        transform = compat.transform_of(jax.tree_util.tree_leaves((args, kwargs)))
        if transform is not None:
            raise UnsupportedProgramError(
                f"{transform} cannot transform a step planned by memplan.jit: the order of its "
                "kernels would be lost. Decorate the outermost step instead, the one that calls "
                f"{transform}."
            )
        warnings.warn(
            "a step planned by memplan.jit was called inside another jax.jit, scan or similar, "
            "which inlines it without a plan. Decorate the outermost step instead.",
            stacklevel=3,
        )
        return self._step(*args, **kwargs)


class Stage:
    """The properties that all stages share, as in `jax.stages`."""

    def __init__(self, stage: jax.stages.Traced):
        self._stage = stage

    @property
    def args_info(self) -> Any:
        """Shape, type and donation of each dynamic leaf of (args, kwargs)."""
        return self._stage.args_info

    @property
    def in_tree(self) -> Any:
        """The tree of (args, kwargs), without static arguments."""
        return compat.in_tree_of(self._stage)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of donated leaves."""
        return self._stage.donate_argnums

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return self._stage.out_tree

    @property
    def out_info(self) -> Any:
        """The results as `jax.ShapeDtypeStruct`s."""
        return self._stage.out_info


class Traced[R](Stage):
    """A step traced for its arguments' shapes, like `jax.stages.Traced`."""

    def __init__(
        self, jitted: PlannedJit[..., R], stage: jax.stages.Traced, args: Any, kwargs: Any
    ):
        super().__init__(stage)
        self._jitted = jitted
        # Only verify="numbers" needs arrays; otherwise a trace keeps shapes, not arrays, alive.
        needs_arrays = jitted._request.verify == "numbers"
        self._arguments = (args, kwargs) if needs_arrays else shapes_of(args, kwargs)

    @property
    def jaxpr(self) -> Any:
        """The equations of the step."""
        return self._stage.jaxpr

    @property
    def fun_name(self) -> str:
        return self._stage.fun_name

    @property
    def effects(self) -> Any:
        """The side effects of the step, such as calls of Python functions."""
        return self._stage.effects

    def lower(
        self, *, lowering_platforms: Sequence[str] | None = None, _private_parameters: Any = None
    ) -> Planned[R]:
        """Plan the step; runs nothing.

        Args:
          lowering_platforms: must be None; `memplan.jit(device=...)` names the device.
          _private_parameters: must be None; `jax.export` passes them.

        Raises:
          UnsupportedProgramError: `jax.export` exports the step.
        """
        if _private_parameters is not None:
            raise UnsupportedProgramError(
                f"jax.export cannot export {self.fun_name} with its plan: it writes the module "
                "that XLA has not scheduled yet, and a plan is made of scheduled kernels, so the "
                "plan would be lost. For the same kind of device, serialize what is compiled: "
                "jax.experimental.serialize_executable.serialize(step.lower(...).compile()). For "
                "the same step elsewhere, save the plan (step.plan(...).plan.save(path)) and load "
                "it there (memplan.jit(step, plan=memplan.Plan.load(path))). For the step without "
                "a plan, export jax.jit of the function."
            )
        if lowering_platforms is not None:
            raise MemplanError(
                f"{lowering_platforms=}: memplan plans for one device; memplan.jit(device=) names "
                "it."
            )
        args, kwargs = self._arguments
        return self._jitted.plan(*args, **kwargs)


class Planned[R](Stage):
    """A step planned for its arguments' shapes, like `jax.stages.Lowered`; `R` is its result."""

    def __init__(self, outcome: Outcome | Restored, request: Request):
        super().__init__(outcome.program.traced.stage)
        self._outcome = outcome
        self._request = request
        self._runner: Runner | None = None
        self._compiling = threading.Lock()

    @functools.cached_property
    def _compiled_report(self) -> Report:
        """The report before any run."""
        if isinstance(self._outcome, Restored):
            return Report.from_json(self._outcome.report)
        return report_of(self._outcome)

    @property
    def report(self) -> Report:
        """The plan, its predictions and the compiler's figures; after a run, the observed peak."""
        observed_bytes = self._runner.observed_bytes if self._runner is not None else None
        return replace(self._compiled_report, observed_peak_bytes=observed_bytes)

    @property
    def plan(self) -> Plan | None:
        """The plan, which can be saved; None if the step runs unmodified."""
        return self._outcome.plan

    def dump(self, folder: str | os.PathLike[str]) -> Sequence[Path]:
        """Write each form of the step to a readable file, in the order in which they arise.

        The forms are the equations, the transforms, XLA's module, its kernels with seconds and
        buffers, the bytes that are live, the decisions, the written module and the verdict. With
        the environment variable `MEMPLAN_DUMP`, every plan is written to a folder of its own in
        that one.

        Args:
          folder: where the files go; it is made if it is missing.

        Returns:
          The files.

        Raises:
          MemplanError: the plan came from jax's compilation cache, which has no modules.
        """
        if isinstance(self._outcome, Restored):
            raise MemplanError(
                "this plan came from jax's compilation cache, which keeps the plan and its report, "
                "not the modules "
                "that were planned. Set jax_enable_compilation_cache to False, and plan again."
            )
        return write_forms(self._outcome, folder)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The module that the compiler receives; `Compiled.as_text` prints the planned one.

        Args:
          dialect: "stablehlo" (the default) or "hlo".
          debug_info: print the source lines of the step, too.
        """
        return self._lowered.as_text(dialect, debug_info=debug_info)

    def cost_analysis(self) -> Any:
        """XLA's cost estimate of the module that `as_text` prints; None for an absent device."""
        return None if self._outcome.target.described else self._lowered.cost_analysis()

    @property
    def _lowered(self) -> jax.stages.Lowered:
        target = self._outcome.target
        return target.lower(lowerable(self._outcome.program, target.backend))

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled[R]:
        """The step, ready to run on the local backend.

        A step that was planned for another device is planned again for this one.

        Args:
          compiler_options: options of XLA, added to those of `memplan.jit`. They change the
            kernels, so the step is planned again.
        """
        if compiler_options:
            step = self._outcome.program.traced
            all_options = {**(step.options.get("compiler_options") or {}), **compiler_options}
            options = {**step.options, "compiler_options": all_options}
            jitted: PlannedJit[..., R] = PlannedJit(step.step, self._request, options)
            return jitted.plan(*step.args, **step.kwargs).compile()
        with self._compiling:
            if self._runner is None:
                outcome = self._outcome
                if isinstance(outcome, Outcome):
                    outcome = _on_local_backend(outcome, self._request)
                self._runner = Runner(outcome)
        return Compiled(self, self._runner)

    def place(self, argument: Any, position: int = 0) -> Any:
        """Move an argument's leaves to host memory or to the local device, as the plan expects.

        Args:
          argument: arrays, with the tree that was planned for.
          position: of the argument.
        """
        return place_argument(self._outcome.program, argument, position)

    def __repr__(self) -> str:
        return f"<memplan.Planned {self._outcome.program.name}: {status_of(self._outcome)}>"


class Compiled[R](Stage):
    """A planned step that runs, like `jax.stages.Compiled`.

    Call it with the dynamic arguments.
    """

    def __init__(self, planned: Planned[R], runner: Runner):
        super().__init__(runner.program.traced.stage)
        self._planned = planned
        self._runner = runner

    @property
    def report(self) -> Report:
        return self._planned.report

    def as_text(self) -> str:
        """The scheduled HLO module, as the compiler prints it."""
        return self._runner.executable.text

    def memory_analysis(self) -> Any:
        """Bytes of arguments, results, temporaries and code, like `jax.stages.Compiled`."""
        return self._runner.executable.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's cost estimate of the planned kernels, recomputation included."""
        return self._runner.executable.compiled.cost_analysis()

    @property
    def input_shardings(self) -> Any:
        """The sharding of each leaf of (args, kwargs); None if the step does not read it."""
        return self.in_tree.unflatten(_leaves(self._runner.executable.compiled.input_shardings))

    @property
    def output_shardings(self) -> Any:
        """The sharding of each leaf of the results."""
        return self.out_tree.unflatten(_leaves(self._runner.executable.compiled.output_shardings))

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self._runner(*args, **kwargs)

    # `jax.experimental.serialize_executable` reads these three. What XLA compiled carries the plan.
    @property
    def _executable(self) -> Any:
        self._check_serializable()
        return compat.executable_of(self._runner.executable.compiled)

    @property
    def _params(self) -> Any:
        return compat.call_parameters_of(self._runner.executable.compiled)

    @property
    def _no_kwargs(self) -> bool:
        return compat.takes_no_keywords(self._runner.executable.compiled)

    def _check_serializable(self) -> None:
        """Check that what XLA compiled is the whole step.

        Raises:
          UnsupportedProgramError: memplan does something itself in each call.
        """
        program = self._runner.program
        if self._runner.moves_state:
            reason = "moves state between host and device memory"
            advice = "plan it without host_state=, which saves nothing on a CPU"
        elif program.traced.lowers_by_leaves:
            reason = "takes its arguments out of containers that jax cannot lower"
            advice = "pass the contents of the containers to the step"
        else:
            return
        raise UnsupportedProgramError(
            f"the compiled step {program.name} cannot be serialized: memplan {reason} in each "
            f"call, which is no part of the executable. To serialize it, {advice}; or save the "
            "plan (step.plan(...).plan.save(path)) and plan the step where it runs."
        )


def _leaves(shardings: Any) -> list[Any]:
    """The leaves of a tree of shardings, None included."""
    return jax.tree_util.tree_leaves(shardings, is_leaf=lambda sharding: sharding is None)
