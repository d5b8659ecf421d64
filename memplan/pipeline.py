"""The order of the steps: trace, transform, compile with a plan, report. No other file knows it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.compilation import kept
from memplan.compilation.attempts import MOST_TRIES, Attempts
from memplan.compilation.compiler import Compiler, Notify, shapes_of
from memplan.compilation.kept import Kept
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import MemplanError, PlanMismatchError
from memplan.parallel.agreement import one_plan, same_collectives, same_step
from memplan.parallel.meshes import machine_of, processes_of
from memplan.parallel.step import data_parallel_of
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.registry import OWN, planner_named
from memplan.program import compat
from memplan.program.constants import digests_of_constants
from memplan.program.loops.choose import fewer_residuals, pinned_residuals
from memplan.program.loops.residuals import follow_residuals
from memplan.program.loops.stacks import with_indexed_stacks
from memplan.program.pins import check as check_pins
from memplan.program.slabs.choose import SlabCandidate, slab_programs
from memplan.program.slabs.write import follow_slabs
from memplan.program.state.host_state import large_leaves, offload_state
from memplan.program.trace import Program, trace
from memplan.request import UNLIMITED, Request, limits_of
from memplan.results.infeasible import infeasible
from memplan.results.report import report_of
from memplan.units import show_bytes
from memplan.xla.collectives.cost import collective_sequence
from memplan.xla.local import without_spaces
from memplan.xla.target import Target

# Budgets that are asked for to find one that works. Of 300 drawn programs, what was named first was refused in three,
# of which one needed three.
_MOST_ASKED = 3


def run(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Outcome | Restored:
    """Plan a step, and compile it so; or find what an earlier start of the program made of it.

    Raises:
      BudgetError, UnknownDeviceError: the request makes no sense.
      InfeasibleBudgetError: nothing that the compiler measured fits, and this was to be verified.
      PlanMismatchError: `request.plan` is for another program.
    """
    plain = traced(step, args, kwargs, options, request, notify)
    key = _key(plain, request)
    if (known := kept.find(key) if key else None) is not None:
        notify("restoring what an earlier start compiled", None)
        if (restored := _restored(plain, request, known, notify)) is not None:
            return restored
    found = _best(plain, request, notify, key)
    followed = request.plan
    if not found.fits and followed is not None and followed.fingerprint != found.planned.plain.module.fingerprint:
        notify("planning anew, as XLA chose other kernels", None)
        found = _best(plain, replace(request, plan=None), notify)
    if not found.fits and request.verify is not None:
        raise infeasible(found, working_budget(request, found, notify), bool(request.split))
    if found.name and found.fits:
        plan = found.plan and found.plan.to_json()
        kept.keep(key, Kept(found.name, found.hides_latency, plan, report_of(found).to_json()), found.seconds)
    return found


def working_budget(request: Request, refused: Outcome, notify: Notify) -> int:
    """Bytes of a budget that works: what a refused outcome takes, or somewhat more.

    Where its loops or slabs were chosen for the budget that was refused, others may be for what it takes.
    """
    asked, unplanned = refused.device_bytes, (refused.unmodified or refused.planned.plain).device_bytes
    same_again = refused.program.rewritten is None and asked <= refused.planned.predicted_bytes
    if same_again or request.plan is not None:
        return min(asked, unplanned)
    for _ in range(_MOST_ASKED):
        if asked >= unplanned:
            break
        notify("looking for a budget that works", None)
        found = _best(refused.program.original, replace(request, budget=asked), notify)
        if found.fits:
            return asked
        asked = max(found.device_bytes, asked + 1)
    return unplanned


def best(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Outcome:
    """The outcome that fits, or else the smallest, planned now; raises like `run`, except if nothing fits."""
    return _best(traced(step, args, kwargs, options, request, notify), request, notify)


def unplanned(plain: Program, request: Request, notify: Notify) -> Outcome:
    """What `traced` returned, compiled without a budget: as it is, but for state on the host and pins."""
    return _best(plain, replace(request, budget=UNLIMITED, split=False), notify)


def _key(plain: Program, request: Request) -> str:
    """Of all that a plan depends on; "" where jax's persistent cache is off, or a second start needs XLA or the step.

    It needs XLA over several devices: the collectives of all processes are compared, and unexpected gathers told.
    """
    target = request.target
    restores = request.plan is None and request.verify != "numbers" and planner_named(request.planner) is OWN
    if not restores or target.described or plain.machine is not None or compat.disk_cache() is None:
        return ""
    step = plain.digest, *digests_of_constants(plain.traced.jaxpr), plain.options.get("compiler_options")
    asked = limits_of(request, target), request.host_state, request.split, request.verify, request.pins
    return kept.digest(*step, *asked, target.device, os.environ.get("XLA_FLAGS"))


def _restored(plain: Program, request: Request, known: Kept, notify: Notify) -> Outcome | Restored | None:
    """What an earlier start compiled, or its plan followed; None if that no longer fits."""
    target = request.target
    try:
        follow = Plan.from_json(known.plan) if known.plan is not None else None
        program = _followed(plain, follow, follow.on_host if follow else (), target)
        found = _compiler(plain, replace(request, plan=follow), notify).restore(program, known)
    except PlanMismatchError:
        return None
    return found if isinstance(found, Restored) or found.fits else None


def _followed(plain: Program, follow: Plan | None, held: Collection[int], target: Target) -> Program:
    """The step with the transforms of a plan, in one order: loops' stacks and residuals, slabs, state on the host."""
    if follow:
        by_index = (with_indexed_stacks(plain) or plain) if follow.indexed_stacks else plain
        with_loops = follow_residuals(by_index, follow.loops) if follow.loops else by_index
    else:
        with_loops = pinned_residuals(plain, target.device) if plain.pins else plain
    in_slabs = follow_slabs(with_loops, follow.slabs) if follow else with_loops
    return offload_state(in_slabs, inputs=held, streams=target.is_gpu)


def _compiler(plain: Program, request: Request, notify: Notify, key: str = "") -> Compiler:
    target, agree = request.target, functools.partial(one_plan, _processes(plain, request.target), plain.step)
    limits, planner = limits_of(request, target), planner_named(request.planner)
    return Compiler(target, limits, planner, request.plan, agree, notify, request.between_hosts, key)


def _processes(plain: Program, target: Target) -> tuple[int, ...]:
    """Those that the step is divided over."""
    division = plain.traced.division
    return processes_of(division.devices or ()) if division and not target.described else ()


def _best(plain: Program, request: Request, notify: Notify, key: str = "") -> Outcome:
    started = time.perf_counter()
    target, follow = request.target, request.plan
    limits = limits_of(request, target)
    held = follow.on_host if follow else large_leaves(plain, request.host_state) if request.host_state else ()
    program = _followed(plain, follow, held, target)
    offload = functools.partial(offload_state, inputs=held, streams=target.is_gpu)
    processes = _processes(plain, target)
    same_step(processes, plain, (plain.options, request))

    def with_fewer_residuals(program: Program, excess_bytes: int, moves: bool) -> Program | None:
        # Of state on the host, each trip of a loop in one piece streams its layer.
        host_bytes = limits.host_bytes if moves else 0
        found = fewer_residuals(program, target.device, host_bytes, excess_bytes, may_segment=not held)
        return found and offload(found)

    one_gpu = target.is_gpu and plain.traced.division is None and not held

    def by_index(program: Program) -> Program | None:
        return with_indexed_stacks(program) if one_gpu else None

    def in_slabs(program: Program, slower: float) -> Iterator[SlabCandidate]:
        if request.split:
            notify("choosing slabs", None)
            for one in slab_programs(
                by_index(plain) or plain, target.device, limits.device_bytes, limits.host_bytes, slower
            ):
                yield replace(one, write=lambda one=one: offload(one.write()))

    tries = MOST_TRIES if request.verify else 1
    compiler = _compiler(plain, request, notify, key)
    attempts = Attempts(compiler, by_index, with_fewer_residuals, in_slabs, notify, follow, tries, target.is_gpu)
    found = attempts.run(program)
    if processes:
        same_collectives(processes, plain.step, collective_sequence(found.planned.result.module))
    if found.host_bytes and not target.described and (setting := without_spaces()):
        raise MemplanError(
            f"with {setting}, XLA allocates host memory on the GPU, so the {show_bytes(found.host_bytes)} that this "
            "step keeps on the host would be on the device. Start Python without it, or plan with host_budget=0."
        )
    return replace(found, seconds=time.perf_counter() - started)


def traced(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Program:
    """The step as a program, on the machine that its partitions run on.

    Raises like `trace`, BudgetError and UnknownDeviceError for a request that makes no sense, and TopologyError.
    """
    target = request.target
    _ = limits_of(request, target)  # a request that makes no sense is refused first
    notify("tracing", None)
    args, kwargs = shapes_of(args, kwargs)
    divided = data_parallel_of(step)
    if divided is not None and not kwargs and "in_shardings" not in options:  # so that arguments need not be placed
        options = {**options, "in_shardings": divided.shardings(*args)}
    program = trace(step, args, kwargs, options, target.platform if target.described else None)
    if request.pins:
        program = replace(program, pins=_pins_there(program, request))
    division = program.traced.division
    if division is None:
        return program
    return replace(program, machine=machine_of(division, request.topology, target.described))


def _pins_there(program: Program, request: Request) -> tuple[Pin, ...]:
    """The pins on the target: where host memory and device memory are the same, the host's stay on the device.

    Raises:
      MemplanError: no value has such a name.
      UnsupportedProgramError: the step itself computes the value again.
    """
    check_pins(program.traced.jaxpr, request.pins)
    if request.target.is_gpu:
        return request.pins
    return tuple(Pin(pin.name, Where.DEVICE) if pin.where is Where.HOST else pin for pin in request.pins)


def local(found: Outcome, request: Request) -> Outcome:
    """The outcome itself, or one for the local backend if it was made for an absent GPU."""
    if not found.target.described:
        return found
    step = found.program.traced
    here = best(step.step, step.args, step.kwargs, step.options, request.local(found.limits.device_bytes))
    if not here.fits:
        raise MemplanError(
            f"the step fits its budget on {found.target.device.name}, but not on this machine's "
            f"{here.target.device.name}, which has other kernels. Run it there, or raise the budget."
        )
    return here
