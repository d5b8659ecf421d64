"""What to do first about a step's memory.

Arrays, constants and types are counted (`results.findings`). If memplan can make the change, it
compiles the changed step once and subtracts its bytes; of several batches, only the one it advises.
For a step that fits, only changes that cost nothing are listed.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from memplan import pipeline
from memplan.compilation.compiler import shapes_of
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.errors import UnsupportedProgramError
from memplan.pipeline import Exploration, Notify
from memplan.program import compat
from memplan.program.state.host_state import large_leaves
from memplan.program.trace import Program
from memplan.report.diagnosis import KINDS, Diagnosis, Finding, Kind
from memplan.request import Request, limits_of, traced
from memplan.results.findings import arguments_of, counted, is_large, replaced_inputs
from memplan.results.infeasible import floor_of
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS
from memplan.studies.largest import last_compiled
from memplan.units import show_bytes

_MAX_COMPILED = 4  # compiled changes of a kind, largest first; the others stay counted
_PARTS = 32  # batches, 3 % apart; a bisection finds the largest in five explorations


def doctor(
    step: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Diagnosis:
    """Find what saves memory of a step (see `api.doctor`)."""
    args, _ = shapes_of(args, {})
    donated = options["donate_argnums"] if "donate_argnums" in options else _donated_by(step, args)
    numbers = (donated,) if isinstance(donated, int) else tuple(donated)
    case = _Case(step, args, numbers, options, request, notify)
    studies = _FREE_CHANGES if case.fits else (*_FREE_CHANGES, *_COSTLY_CHANGES)
    findings = [finding for study in studies for finding in study(case)]
    return Diagnosis(
        device=request.target.device.name,
        budget_bytes=case.limits.device_bytes,
        device_bytes=case.plain.device_bytes,
        step_s=case.plain.step_s,
        findings=tuple(sorted(findings, key=lambda finding: KINDS.index(finding.kind))),
        compilations=case.compilations,
        versions=versions(),
    )


def _donated_by(step: Callable[..., Any], args: Sequence[Any]) -> tuple[int, ...]:
    """Arguments that a step of `jax.jit` donates; inside another `jax.jit`, jax ignores this."""
    trace = getattr(step, "trace", None)
    if trace is None:
        return ()
    flags = iter(compat.donated_inputs(trace(*args)))
    donated = [[next(flags) for _ in jax.tree.leaves(arg)] for arg in args]
    return tuple(number for number, leaves in enumerate(donated) if leaves and all(leaves))


@dataclass
class _Case:
    """A step, and the compilations of its changes."""

    step: Callable[..., Any]
    args: Sequence[Any]  # shapes
    donated: tuple[int, ...]  # numbers of its arguments
    options: Mapping[str, Any]  # of `jax.jit`; `donated` replaces its own
    request: Request
    notify: Notify
    compilations: int = 0
    _donating: dict[int, Outcome] = field(default_factory=dict)

    @functools.cached_property
    def plain(self) -> Outcome:
        """The unchanged step, without the request's pins and host state."""
        options = {**self.options, "donate_argnums": self.donated}
        program = traced(self.step, self.args, {}, options, self._bare)
        return self.compiled("the step as it is", program)

    @property
    def _bare(self) -> Request:
        return replace(self.request, host_state=(), pin=None)

    @functools.cached_property
    def limits(self) -> Limits:
        return limits_of(self.request, self.request.target)

    @property
    def budget(self) -> str:
        """As an argument of `memplan.jit`."""
        return "" if self.request.budget is None else f"budget={self.request.budget!r}"

    @property
    def fits(self) -> bool:
        return self.plain.device_bytes <= self.limits.device_bytes

    def traced(
        self,
        step: Callable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
        donated: tuple[int, ...] = (),
    ) -> Program:
        """A changed step, with more arguments donated."""
        options = {**self.plain.program.options, "donate_argnums": (*self.donated, *donated)}
        args = self.args if args is None else args
        # The warnings are known from the unchanged step, or due to the change.
        with warnings.catch_warnings(action="ignore"):
            return traced(step or self.step, args, {}, options, self._bare)

    def compiled(self, change: str, program: Program) -> Outcome:
        """A changed step, compiled without a plan."""
        stage = f"compiling {change}"
        self.notify(stage, None)
        with warnings.catch_warnings(action="ignore"):
            outcome = pipeline.best_of(
                program, self._bare.unlimited, lambda _, share: self.notify(stage, share)
            )
        self.compilations += outcome.compilations
        return outcome

    def explored(self, change: str, program: Program) -> Exploration:
        """A changed step as XLA schedules it, without a plan."""
        stage = f"exploring {change}"
        self.notify(stage, None)
        return pipeline.explore(
            program, self._bare.unlimited, lambda _, share: self.notify(stage, share), modules={}
        )

    def committed(self, exploration: Exploration) -> Outcome:
        """An explored step, compiled."""
        outcome = exploration.commit()
        self.compilations += outcome.compilations
        return outcome

    def planned(
        self, change: str, donated: tuple[int, ...] = (), on_host: tuple[int, ...] = ()
    ) -> Outcome:
        """The step within the budget, with more arguments donated and more state on the host."""
        request = replace(self.request, host_state=(*self.request.host_state, *on_host))
        options = {**self.options, "donate_argnums": (*self.donated, *donated)}
        with warnings.catch_warnings(action="ignore"):
            outcome = pipeline.best(
                self.step,
                self.args,
                {},
                options,
                request,
                lambda stage, share: self.notify(f"{change}: {stage}", share),
            )
        self.compilations += outcome.compilations
        return outcome

    def with_donated(self, number: int) -> Outcome:
        """The step with one more argument donated, unless it is already."""
        if number in self.donated:
            return self.plain
        if number not in self._donating:
            program = self.traced(donated=(number,))
            self._donating[number] = self.compiled(f"with argument {number} donated", program)
        return self._donating[number]

    def finding(
        self, kind: Kind, advice: str, outcome: Outcome, plain: Outcome | None = None, **fields: Any
    ) -> Finding:
        """The saving of a compiled change."""
        plain = plain or self.plain
        return Finding(
            kind=kind,
            advice=advice,
            gained_bytes=plain.device_bytes - outcome.device_bytes,
            added_s=outcome.step_s - plain.step_s,
            device_bytes=outcome.device_bytes,
            host_bytes=outcome.host_bytes,
            measured="compiled",
            **fields,
        )

    def is_large(self, finding: Finding) -> bool:
        return is_large(finding.gained_bytes, self.plain.device_bytes)


def _counted(case: _Case) -> Iterator[Finding]:
    """The findings counted in the step, some of them compiled."""
    counts = Counter[Kind]()
    for finding in counted(case.plain):
        counts[finding.kind] += 1
        outcome = None
        if finding.kind in _CHANGES and counts[finding.kind] <= _MAX_COMPILED:
            outcome = _CHANGES[finding.kind](case, finding)
        if outcome is not None:
            finding = case.finding(
                finding.kind,
                finding.advice,
                outcome,
                source=finding.source,
                position=finding.position,
            )
        if case.is_large(finding):
            yield finding


def _without_output(case: _Case, finding: Finding) -> Outcome:
    def without(results: Any) -> list[Any]:
        leaves = jax.tree.leaves(results)
        return [leaf for number, leaf in enumerate(leaves) if number != finding.position]

    program = case.traced(_new_function(case.step, without))
    return case.compiled(f"without output {finding.position}", program)


def _in_32_bits(case: _Case, finding: Finding) -> Outcome | None:
    """None if the step itself requests 64 bits."""

    def narrow(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or compat.is_key(leaf):
            return leaf
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=getattr(leaf, "sharding", None))

    with jax.enable_x64(False), contextlib.suppress(TypeError, *REFUSALS):
        program = case.traced(_new_function(case.step), jax.tree.map(narrow, case.args))
        return case.compiled("in 32 bits", program)


def _new_function(
    step: Callable[..., Any],
    change: Callable[[Any], Any] = lambda results: results,
) -> Callable[..., Any]:
    """A new function, since jax caches traces by function; it changes the step's results."""

    @functools.wraps(step)
    def changed(*args: Any) -> Any:
        return change(step(*args))

    return changed


_CHANGES: Mapping[Kind, Callable[[_Case, Finding], Outcome | None]] = {
    "donate": lambda case, finding: case.with_donated(finding.position or 0),
    "output": _without_output,
    "x64": _in_32_bits,
}


def _state_on_host(case: _Case) -> Iterator[Finding]:
    """The state of each argument in host memory."""
    if not case.request.target.backend.has_own_memory:
        return
    program = case.plain.program
    state = set(replaced_inputs(program).values())
    for argument in arguments_of(program):
        if argument.number in case.request.host_state or not state & large_leaves(
            program, [argument.number]
        ):
            continue
        plain = case.with_donated(argument.number)
        donated = () if argument.number in case.donated else (argument.number,)
        try:
            outcome = case.planned(f"{argument.name} on the host", donated, (argument.number,))
        except UnsupportedProgramError:  # by XLA or by the transform
            continue
        with_plan = ", with a plan" if outcome.planned.plan is not None else ""
        advice = (
            f"keep the state in {argument.name} in host memory, "
            f"host_state={argument.number}{with_plan}"
        )
        finding = case.finding("host state", advice, outcome, plain, position=argument.number)
        if case.is_large(finding):
            yield finding


def _batch(case: _Case) -> Iterator[Finding]:
    """The largest batch, of at least half the rows, that fits without a plan."""
    program = case.plain.program
    leaves, tree = jax.tree.flatten(case.args)
    state = set(replaced_inputs(program).values())
    arrays = [n for n, leaf in enumerate(leaves) if n not in state and np.ndim(leaf)]
    if program.machine is not None or not arrays:
        return
    rows = leaves[max(arrays, key=lambda n: program.input_nbytes[n])].shape[0]
    sizes = range(rows // 2, rows, max(1, rows // _PARTS))
    explored: dict[int, Exploration] = {}
    outcomes: dict[int, Outcome] = {}

    @functools.cache
    def fits(position: int) -> bool:
        count = sizes[position]
        parts = list(leaves)
        for n in arrays:
            if leaves[n].shape[0] == rows:
                parts[n] = jax.ShapeDtypeStruct((count, *leaves[n].shape[1:]), leaves[n].dtype)
        try:
            program = case.traced(_new_function(case.step), jax.tree.unflatten(tree, parts))
        except Exception:  # the user's step need not work with every batch
            return False
        explored[count] = case.explored(f"a batch of {count}", program)
        return explored[count].best.device_bytes <= case.limits.device_bytes

    def fits_compiled(position: int) -> bool:
        count = sizes[position]
        outcomes[count] = case.committed(explored[count])
        return outcomes[count].device_bytes <= case.limits.device_bytes

    if rows < 2 or not fits(0):
        return
    last = last_compiled(len(sizes), fits, fits_compiled)
    if last < 0:
        return
    count = sizes[last]
    outcome = outcomes[count]
    sample = show_bytes((case.plain.device_bytes - outcome.device_bytes) // (rows - count))
    refused = min(count + sizes.step, rows)
    advice = f"take a batch of {count} instead of {rows}, {sample} for each: {refused} do not fit"
    yield case.finding("batch", advice, outcome)


def _plan(case: _Case) -> Iterator[Finding]:
    """The step planned for the budget, in slabs if one of its kernels exceeds the budget alone."""
    outcome = case.planned("the step")
    floor_bytes, kernel = floor_of(case.plain)
    if not outcome.fits:
        smallest = show_bytes(outcome.device_bytes)
        advice = f"no plan fits, the smallest takes {smallest}: make the batch or image smaller"
        yield case.finding("plan", advice, outcome)
    elif floor_bytes > case.limits.device_bytes:
        needs = f"{kernel} alone takes {show_bytes(floor_bytes)}"
        advice = f"let memplan.jit({case.budget}) run kernels in slabs: {needs}"
        yield case.finding("slabs", advice, outcome)
    else:
        yield case.finding("plan", f"plan it: memplan.jit({case.budget})", outcome)


_Study = Callable[[_Case], Iterator[Finding]]
_FREE_CHANGES: Sequence[_Study] = (_counted,)
_COSTLY_CHANGES: Sequence[_Study] = (_state_on_host, _batch, _plan)  # in time, or in results
