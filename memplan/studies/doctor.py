"""What to do first about a step's memory: each changed step is compiled once, and its bytes are subtracted.

What arrays, constants and types take is counted (`results.findings`); where the change can be made here, the changed
step is compiled. A step that fits is only told what costs nothing.
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
from memplan.pipeline import Notify, Request
from memplan.program import compat
from memplan.program.state.host_state import large_leaves
from memplan.program.trace import Program
from memplan.report.diagnosis import KINDS, Diagnosis, Finding, Kind
from memplan.results.findings import arguments_of, counted, is_large, replaced_inputs
from memplan.results.infeasible import floor_of
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS
from memplan.studies.largest import last_fitting
from memplan.units import show_bytes

_MOST_COMPILED = 4  # changes of a kind: those of the largest findings; the others stay counted
_PARTS = 32  # of a batch, which five compilations tell apart: one more makes a step 3 % larger at most


def doctor(
    step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], request: Request, notify: Notify
) -> Diagnosis:
    """Find what saves memory of a step (see `api.doctor`)."""
    args, _ = shapes_of(args, {})
    donated = options["donate_argnums"] if "donate_argnums" in options else _donated_by_itself(step, args)
    case = _Case(step, args, (donated,) if isinstance(donated, int) else tuple(donated), request, notify)
    studies = (*_STUDIES, *(() if case.fits else _WHERE_IT_DOES_NOT_FIT))
    findings = [one for study in studies for one in study(case)]
    return Diagnosis(
        device=request.target.device.name,
        budget_bytes=case.limits.device_bytes,
        device_bytes=case.plain.device_bytes,
        step_s=case.plain.step_s,
        findings=tuple(sorted(findings, key=lambda one: KINDS.index(one.kind))),
        compilations=case.compilations,
        versions=versions(),
    )


def _donated_by_itself(step: Callable[..., Any], args: Sequence[Any]) -> tuple[int, ...]:
    """Arguments that a step of `jax.jit` donates; inside of another `jax.jit`, its own options do not count."""
    trace = getattr(step, "trace", None)
    if trace is None:
        return ()
    flags = iter(compat.donated_inputs(trace(*args)))
    donated = [[next(flags) for _ in jax.tree.leaves(arg)] for arg in args]
    return tuple(number for number, leaves in enumerate(donated) if leaves and all(leaves))


@dataclass
class _Case:
    """A step, and what was compiled of it."""

    step: Callable[..., Any]
    args: Sequence[Any]  # shapes
    donated: tuple[int, ...]  # arguments
    request: Request
    notify: Notify
    compilations: int = 0
    _donating: dict[int, Outcome] = field(default_factory=dict)

    @functools.cached_property
    def plain(self) -> Outcome:
        """The step as it is, without what the request asks of memplan."""
        program = pipeline.traced(self.step, self.args, {}, {"donate_argnums": self.donated}, self._bare)
        return self.compiled("the step as it is", program)

    @property
    def _bare(self) -> Request:
        return replace(self.request, host_state=(), pin=None)

    @functools.cached_property
    def limits(self) -> Limits:
        return pipeline.limits_of(self.request, self.request.target)

    @property
    def budget(self) -> str:
        """As an argument of `memplan.jit`."""
        return "" if self.request.budget is None else f"budget={self.request.budget!r}"

    @property
    def fits(self) -> bool:
        return self.plain.device_bytes <= self.limits.device_bytes

    def traced(
        self, step: Callable[..., Any] | None = None, args: Sequence[Any] | None = None, donated: tuple[int, ...] = ()
    ) -> Program:
        """A changed step, with more arguments donated."""
        options = {**self.plain.program.options, "donate_argnums": (*self.donated, *donated)}
        with warnings.catch_warnings(action="ignore"):  # jax said it of the step as it is, or it is of the change
            return pipeline.traced(step or self.step, self.args if args is None else args, {}, options, self._bare)

    def compiled(self, what: str, program: Program) -> Outcome:
        """Compiled without a plan."""
        stage = f"compiling {what}"
        self.notify(stage, None)
        with warnings.catch_warnings(action="ignore"):
            found = pipeline.unplanned(program, self._bare, lambda _, share: self.notify(stage, share))
        self.compilations += found.compilations
        return found

    def planned(self, what: str, donated: tuple[int, ...] = (), on_host: tuple[int, ...] = ()) -> Outcome:
        """Planned for the budget if it must be, with more arguments donated, and the state in some on the host."""
        request = replace(self.request, host_state=(*self.request.host_state, *on_host))
        options = {"donate_argnums": (*self.donated, *donated)}
        with warnings.catch_warnings(action="ignore"):
            found = pipeline.best(
                self.step, self.args, {}, options, request, lambda stage, share: self.notify(f"{what}: {stage}", share)
            )
        self.compilations += found.compilations
        return found

    def with_donated(self, number: int) -> Outcome:
        """With one more argument donated, unless it is already."""
        if number in self.donated:
            return self.plain
        if number not in self._donating:
            self._donating[number] = self.compiled(f"with argument {number} donated", self.traced(donated=(number,)))
        return self._donating[number]

    def finding(self, kind: Kind, advice: str, found: Outcome, plain: Outcome | None = None, **fields: Any) -> Finding:
        """What a compiled change saves."""
        plain = plain or self.plain
        return Finding(
            kind=kind,
            advice=advice,
            gained_bytes=plain.device_bytes - found.device_bytes,
            added_s=found.step_s - plain.step_s,
            device_bytes=found.device_bytes,
            host_bytes=found.host_bytes,
            measured="compiled",
            **fields,
        )

    def is_large(self, finding: Finding) -> bool:
        return is_large(finding.gained_bytes, self.plain.device_bytes)


def _counted(case: _Case) -> Iterator[Finding]:
    """What is counted in the step as it is; where the change can be made here, compiled."""
    seen = Counter[Kind]()
    for one in counted(case.plain):
        seen[one.kind] += 1
        change = _CHANGES.get(one.kind)
        found = change(case, one) if change and seen[one.kind] <= _MOST_COMPILED else None
        if found is not None:
            one = case.finding(one.kind, one.advice, found, source=one.source, position=one.position)
        if case.is_large(one):
            yield one


def _without_output(case: _Case, finding: Finding) -> Outcome:
    def kept(results: Any) -> list[Any]:
        return [leaf for number, leaf in enumerate(jax.tree.leaves(results)) if number != finding.position]

    return case.compiled(f"without output {finding.position}", case.traced(_again(case.step, kept)))


def _in_32_bits(case: _Case, finding: Finding) -> Outcome | None:
    """None where the step itself asks for 64 bits."""

    def narrow(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or compat.is_key(leaf):
            return leaf
        dtype, sharding = jax.dtypes.canonicalize_dtype(leaf.dtype), getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    with jax.enable_x64(False), contextlib.suppress(TypeError, *REFUSALS):
        program = case.traced(_again(case.step), jax.tree.map(narrow, case.args))
        return case.compiled("in 32 bits", program)


def _again(step: Callable[..., Any], change: Callable[[Any], Any] = lambda results: results) -> Callable[..., Any]:
    """The step as a function of its own, with changed results: jax keeps traces by function."""

    @functools.wraps(step)
    def again(*args: Any) -> Any:
        return change(step(*args))

    return again


_CHANGES: Mapping[Kind, Callable[[_Case, Finding], Outcome | None]] = {
    "donate": lambda case, finding: case.with_donated(finding.position or 0),
    "output": _without_output,
    "x64": _in_32_bits,
}


def _state_on_host(case: _Case) -> Iterator[Finding]:
    """Each argument with state, in host memory."""
    if not case.request.target.is_gpu:
        return
    program = case.plain.program
    state = set(replaced_inputs(program).values())
    for one in arguments_of(program):
        if one.number in case.request.host_state or not state & large_leaves(program, [one.number]):
            continue
        plain = case.with_donated(one.number)
        donated = () if one.number in case.donated else (one.number,)
        try:
            found = case.planned(f"{one.name} on the host", donated, (one.number,))
        except UnsupportedProgramError:  # XLA, or the transform, refuses it
            continue
        planned = ", with a plan" if found.planned.plan is not None else ""
        advice = f"keep the state in {one.name} in host memory, host_state={one.number}{planned}"
        finding = case.finding("host state", advice, found, plain, position=one.number)
        if case.is_large(finding):
            yield finding


def _batch(case: _Case) -> Iterator[Finding]:
    """The largest batch that fits without a plan, by parts of this one, if it is at least half of it."""
    program, plain = case.plain.program, case.plain
    leaves, tree = jax.tree.flatten(case.args)
    state = set(replaced_inputs(program).values())
    arrays = [n for n, leaf in enumerate(leaves) if n not in state and np.ndim(leaf)]
    if program.machine is not None or not arrays:
        return
    rows = leaves[max(arrays, key=lambda n: program.input_nbytes[n])].shape[0]
    sizes, outcomes = range(rows // 2, rows, max(1, rows // _PARTS)), dict[int, Outcome]()

    def fits(position: int) -> bool:
        count = sizes[position]
        parts = list(leaves)
        for n in arrays:
            if leaves[n].shape[0] == rows:
                parts[n] = jax.ShapeDtypeStruct((count, *leaves[n].shape[1:]), leaves[n].dtype)
        try:
            program = case.traced(_again(case.step), jax.tree.unflatten(tree, parts))
        except Exception:  # of the user's step, which was not written for such a batch
            return False
        outcomes[count] = case.compiled(f"a batch of {count}", program)
        return outcomes[count].device_bytes <= case.limits.device_bytes

    if rows < 2 or not fits(0):
        return
    last = last_fitting(len(sizes) - 1, lambda position: fits(position + 1)) + 1
    count, found = sizes[last], outcomes[sizes[last]]
    sample = show_bytes((plain.device_bytes - found.device_bytes) // (rows - count))
    advice = f"take a batch of {count} instead of {rows}, {sample} for each: {min(count + sizes.step, rows)} do not fit"
    yield case.finding("batch", advice, found)


def _plan(case: _Case) -> Iterator[Finding]:
    """The step planned for the budget; in slabs where its largest kernel alone is above it."""
    found = case.planned("the step")
    floor_bytes, kernel = floor_of(case.plain)
    if not found.fits:
        advice = f"no plan fits, the smallest takes {show_bytes(found.device_bytes)}: make the batch or image smaller"
        yield case.finding("plan", advice, found)
    elif floor_bytes > case.limits.device_bytes:
        advice = f"let memplan.jit({case.budget}) run kernels in slabs: {kernel} alone takes {show_bytes(floor_bytes)}"
        yield case.finding("slabs", advice, found)
    else:
        yield case.finding("plan", f"plan it: memplan.jit({case.budget})", found)


_Study = Callable[[_Case], Iterator[Finding]]
_STUDIES: Sequence[_Study] = (_counted,)  # remedies that cost no time
_WHERE_IT_DOES_NOT_FIT: Sequence[_Study] = (_state_on_host, _batch, _plan)
