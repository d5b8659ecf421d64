"""The order of the steps: transform, compile with a plan, report. No other file knows it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.compilation import kept
from memplan.compilation.attempts import MOST_TRIES, Attempts
from memplan.compilation.compiler import Compiler, Notify
from memplan.compilation.kept import Kept
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import InfeasibleBudgetError, PlanMismatchError
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
from memplan.results.infeasible import infeasible, refuse_host_memory_on_device, working_budget
from memplan.results.report import report_of
from memplan.xla.collectives.cost import collective_sequence


def run(program: Program, request: Request, notify: Notify) -> Outcome | Restored:
    """Plan and compile a traced step, or restore it from jax's persistent cache.

    Raises:
      InfeasibleBudgetError: no compiled program fits, and `request.verify` is not None.
      PlanMismatchError: `request.plan` belongs to another program.
    """
    key = cache_key(program, request)
    entry = kept.find(key) if key else None
    if entry is not None:
        notify("restoring what an earlier start compiled", None)
        restored = _restored(program, request, entry, notify)
        if restored is not None:
            return restored
    outcome = best_of(program, request, notify, key)
    if (
        not outcome.fits
        and request.plan is not None
        and request.plan.fingerprint != outcome.planned.plain.module.fingerprint
    ):
        notify("planning anew, as XLA chose other kernels", None)
        outcome = best_of(program, replace(request, plan=None), notify)
    if not outcome.fits and request.verify is not None:
        raise infeasible_error(outcome, request, notify)
    if outcome.name and outcome.fits:
        plan = None if outcome.plan is None else outcome.plan.to_json()
        entry = Kept(outcome.name, outcome.hides_latency, plan, report_of(outcome).to_json())
        kept.keep(key, entry, outcome.seconds)
    return outcome


def infeasible_error(outcome: Outcome, request: Request, notify: Notify) -> InfeasibleBudgetError:
    """The error for an outcome that does not fit; it names a budget that works."""

    def plan_within(budget: int) -> Outcome:
        notify("looking for a budget that works", None)
        return best_of(outcome.program.original, replace(request, budget=budget), notify)

    smallest = working_budget(outcome, None if request.plan else plan_within)
    return infeasible(outcome, smallest, bool(request.split))


def best(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Outcome:
    """The outcome that fits, else the smallest, without the cache; raises like `traced`."""
    return best_of(traced(step, args, kwargs, options, request, notify), request, notify)


def best_of(program: Program, request: Request, notify: Notify, key: str = "") -> Outcome:
    """The outcome of a traced step that fits, else the smallest."""
    started = time.perf_counter()
    target, saved_plan = request.target, request.plan
    processes = processes_of(program.traced.division, target.described)
    same_step(processes, program, (program.options, request))
    candidates = _candidates(program, request)
    outcome = Attempts(
        _compiler(program, request, notify, key),
        candidates,
        notify,
        saved_plan,
        tries=MOST_TRIES if request.verify else 1,
        copies_overlap=target.backend.has_own_memory,
    ).run(apply_all(program, saved_plan.transforms) if saved_plan else candidates.first)
    if processes:
        sequence = collective_sequence(outcome.planned.result.module)
        same_collectives(processes, program.step, sequence)
    if not target.described:
        refuse_host_memory_on_device(outcome.host_bytes)
    return replace(outcome, seconds=time.perf_counter() - started)


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


def _compiler(program: Program, request: Request, notify: Notify, key: str = "") -> Compiler:
    """A compiler for the programs of a step, within the limits of the request."""
    processes = processes_of(program.traced.division, request.target.described)
    return Compiler(
        request.target,
        limits_of(request, request.target),
        planner_named(request.planner),
        request.plan,
        functools.partial(one_plan, processes, program.step),
        notify,
        request.between_hosts,
        key,
    )
