"""The order of the steps: transform, compile with a plan, report. No other file knows it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.compilation import kept
from memplan.compilation.attempts import MOST_TRIES, Attempts, History
from memplan.compilation.compiler import Compiler, Modules, Notify
from memplan.compilation.deadline import TIME_LIMIT, Deadline
from memplan.compilation.kept import Kept
from memplan.compilation.outcome import Explored, Outcome, Restored
from memplan.compilation.variants import needs_better
from memplan.errors import MemplanError, PlanMismatchError
from memplan.parallel.agreement import one_plan, same_collectives, same_step
from memplan.parallel.meshes import processes_of
from memplan.planning.plan import Plan
from memplan.planning.registry import planner_named
from memplan.planning.transforms import StateOnHost
from memplan.program.candidates import Candidates
from memplan.program.state.host_state import large_leaves
from memplan.program.trace import Program
from memplan.program.transforms import apply_all
from memplan.request import Request, cache_key, limits_of, traced
from memplan.results.infeasible import (
    infeasible,
    out_of_time,
    refuse_host_memory_on_device,
    working_budget,
)
from memplan.results.report import report_of
from memplan.xla.collectives.cost import collective_sequence


def run(program: Program, request: Request, notify: Notify) -> Outcome | Restored:
    """Plan and compile a traced step, or restore it from jax's persistent cache.

    If Ctrl-C is pressed when a program that fits is known, that is compiled; likewise once the time
    limit has passed.

    Raises:
      InfeasibleBudgetError: no compiled program fits, and `request.verify` is not None.
      TimeLimitError: likewise, but the time limit had passed before all were explored.
      PlanMismatchError: `request.plan` belongs to another program.
    """
    key = cache_key(program, request)
    entry = kept.find(key) if key else None
    if entry is not None:
        notify("restoring what an earlier start compiled", None)
        restored = _restored(program, request, entry, notify)
        if restored is not None:
            return restored
    started = time.perf_counter()
    deadline = Deadline(request.time_limit)
    modules: Modules = {}
    exploration = _exploration(program, request, notify, key, modules, True, deadline)
    if exploration.is_refused:
        raise refusal(exploration, request, notify, deadline)
    outcome = replace(exploration.commit(), seconds=time.perf_counter() - started)
    if (
        not outcome.fits
        and request.plan is not None
        and request.plan.fingerprint != outcome.planned.plain.module.fingerprint
    ):
        notify("planning anew, as XLA chose other kernels", None)
        anew = replace(request, plan=None)
        exploration = _exploration(program, anew, notify, "", modules, True, deadline)
        outcome = replace(exploration.commit(), seconds=time.perf_counter() - started)
    if not outcome.fits and request.verify is not None:
        raise refusal(replace(exploration, best=outcome), request, notify, deadline)
    if outcome.name and outcome.fits and not outcome.ended_by:
        plan = None if outcome.plan is None else outcome.plan.to_json()
        entry = Kept(outcome.name, outcome.hides_latency, plan, report_of(outcome).to_json())
        kept.keep(key, entry, outcome.seconds)
    return outcome


def refusal(
    exploration: Exploration, request: Request, notify: Notify, deadline: Deadline
) -> MemplanError:
    """The error for a step whose best program does not fit; it names a budget that works."""
    refused, modules = exploration.best, exploration.modules
    if exploration.ended_by == TIME_LIMIT:
        programs = len(exploration.attempts.history.summaries)
        return out_of_time(refused, programs, deadline.time_limit_s)

    limit_for = request.target.backend.limit_for

    def plan_within(budget: int) -> Explored:
        notify("looking for a budget that works", None)
        within = replace(request, budget=limit_for(budget))
        program = refused.program.original
        return explore(program, within, notify, modules, True, deadline).best

    searches = request.plan is None
    if searches and refused.program.in_slabs and not refused.is_compiled:
        # A search within any budget explores the smallest slabs.
        smallest_slabs = exploration.attempts.candidates.in_smallest_slabs
        searches = all(program is not refused.program for program in smallest_slabs)
    smallest = working_budget(refused, plan_within if searches else None)
    smallest = replace(smallest, device_bytes=limit_for(smallest.device_bytes))
    return infeasible(refused, smallest, bool(request.split))


def best(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
    deadline: Deadline | None = None,
) -> Outcome:
    """The outcome that fits, else the smallest, without the cache; raises like `traced`."""
    program = traced(step, args, kwargs, options, request, notify)
    return best_of(program, request, notify, deadline=deadline)


def best_of(
    program: Program,
    request: Request,
    notify: Notify,
    key: str = "",
    deadline: Deadline | None = None,
) -> Outcome:
    """The outcome of a traced step that fits, else the smallest.

    Args:
      deadline: by default that of a search that begins now.
    """
    started = time.perf_counter()
    deadline = deadline or Deadline(request.time_limit)
    outcome = _exploration(program, request, notify, key, None, False, deadline).commit()
    return replace(outcome, seconds=time.perf_counter() - started)


def _exploration(
    program: Program,
    request: Request,
    notify: Notify,
    key: str,
    modules: Modules | None,
    keeps_fitting: bool,
    deadline: Deadline,
) -> Exploration:
    """A step explored, and compiled if its first program is good enough. See `best_of`.

    Args:
      keeps_fitting: Ctrl-C ends the search if something fits (`Attempts.explore`).
    """
    attempts, first = _attempts(program, request, notify, key, modules)
    # An interrupted process would not compile what the step's other processes do.
    keeps_fitting = keeps_fitting and not _processes(program, request)
    attempts = replace(attempts, keeps_fitting=keeps_fitting, deadline=deadline)
    return Exploration(request, attempts, first, attempts.explore(first))


def explore(
    program: Program,
    request: Request,
    notify: Notify,
    modules: Modules,
    any_that_fits: bool = False,
    deadline: Deadline | None = None,
) -> Exploration:
    """The program of a traced step that should fit, else the smallest; XLA compiles none.

    Args:
      modules: what XLA has scheduled for the step, for this and for other budgets.
      any_that_fits: the first program is good enough, however slow it is.
      deadline: by default that of a search that begins now.
    """
    deadline = deadline or Deadline(request.time_limit)
    attempts, first = _attempts(program, request, notify, modules=modules)
    attempts = replace(attempts, compiles=False, any_that_fits=any_that_fits, deadline=deadline)
    return Exploration(request, attempts, first, attempts.explore(first))


@dataclass(frozen=True)
class Exploration:
    """A step explored within the limits of a request."""

    request: Request
    attempts: Attempts
    first: Program  # the program that was explored first
    best: Explored

    @property
    def explorations(self) -> int:
        """Number of programs that were explored."""
        return self.attempts.history.explorations

    @property
    def ended_by(self) -> str:
        """What ended the exploration before all programs were explored; "" if nothing did."""
        return self.attempts.history.ended_by

    @property
    def modules(self) -> Modules:
        """What XLA has scheduled for the step; empty if that was not to be kept."""
        return self.attempts.compiler.modules or {}

    @property
    def is_refused(self) -> bool:
        """Whether the step is refused without a compilation: nothing should fit."""
        best = self.best
        return not best.fits and not best.is_compiled and self.request.verify is not None

    def commit(self) -> Outcome:
        """The best program compiled; the fastest that fits, if any that fits was explored for."""
        attempts, best = self.attempts, self.best
        if attempts.any_that_fits and best.fits and needs_better(best):
            complete = replace(attempts, any_that_fits=False, history=History())
            fastest = complete.explore(self.first)
            if fastest.fits:  # unless the time limit ended the search before
                attempts, best = complete, fastest
        outcome = attempts.commit(best)
        processes = _processes(self.first, self.request)
        if processes:
            sequence = collective_sequence(outcome.planned.result.module)
            same_collectives(processes, self.first.step, sequence)
        if not self.request.target.described:
            refuse_host_memory_on_device(outcome.host_bytes)
        return outcome


def _attempts(
    program: Program,
    request: Request,
    notify: Notify,
    key: str = "",
    modules: Modules | None = None,
) -> tuple[Attempts, Program]:
    """The attempts at a step, and the program to begin with."""
    target, saved_plan = request.target, request.plan
    same_step(_processes(program, request), program, (program.options, request))
    candidates = _candidates(program, request)
    attempts = Attempts(
        _compiler(program, request, notify, key, modules),
        candidates,
        notify,
        saved_plan,
        tries=MOST_TRIES if request.verify else 1,
        copies_overlap=target.backend.has_own_memory,
    )
    first = apply_all(program, saved_plan.transforms) if saved_plan else candidates.first
    return attempts, first


def _processes(program: Program, request: Request) -> tuple[int, ...]:
    """The processes that run the step together."""
    return processes_of(program.traced.division, request.target.described)


def _restored(
    program: Program, request: Request, entry: Kept, notify: Notify
) -> Outcome | Restored | None:
    """The step of a cache entry, compiled again if jax dropped it; None if it no longer fits."""
    try:
        plan = None if entry.plan is None else Plan.from_json(entry.plan)
        request = replace(request, plan=plan)
        transformed = apply_all(program, plan.transforms if plan else ())
        outcome = _compiler(program, request, notify).restore(transformed, entry)
    except PlanMismatchError:
        return None
    return outcome if outcome.fits else None


def _candidates(program: Program, request: Request) -> Candidates:
    """The programs of a step that may be compiled, with the same state on the host."""
    limits = limits_of(request, request.target)
    device = request.target.device
    on_host = large_leaves(program, request.host_state) if request.host_state else ()
    state = StateOnHost(tuple(sorted(on_host)), streams=device.backend.has_own_memory)
    splits = bool(request.split)
    return Candidates(program, device, limits.device_bytes, limits.host_bytes, state, splits)


def _compiler(
    program: Program,
    request: Request,
    notify: Notify,
    key: str = "",
    modules: Modules | None = None,
) -> Compiler:
    """A compiler for the programs of a step, within the limits of the request."""
    return Compiler(
        request.target,
        limits_of(request, request.target),
        planner_named(request.planner),
        request.plan,
        functools.partial(one_plan, _processes(program, request), program.step),
        notify,
        request.between_hosts,
        key,
        modules,
    )
