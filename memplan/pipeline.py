"""The order of the steps: trace, transform, compile with a plan, report. No other file knows it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.compilation import kept
from memplan.compilation.attempts import MOST_TRIES, Attempts
from memplan.compilation.compiler import Compiler, Notify, shapes_of
from memplan.compilation.kept import Kept
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import BudgetError, MemplanError, PlanMismatchError
from memplan.hardware import catalog, measured
from memplan.hardware.topology import Topology
from memplan.parallel.agreement import one_plan, same_collectives, same_step
from memplan.parallel.meshes import machine_of, processes_of, topology_for
from memplan.parallel.step import data_parallel_of
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.registry import OWN, Planner, planner_named
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
from memplan.results.infeasible import infeasible
from memplan.results.report import report_of
from memplan.units import Size, parse_bytes, show_bytes
from memplan.xla.collectives.cost import collective_sequence
from memplan.xla.local import HOST_LIMIT, export, host_memory_bytes, is_here, local_device, pools, without_spaces
from memplan.xla.target import Target

_CHOICES = {
    "verify": ("compile", "numbers", None),
    "split": ("auto", False),
    "between_hosts": (None, "bfloat16", "float16"),
}
UNLIMITED = 2**60  # bytes of a budget within which every step stays as it is
_FORMS = {  # of what may also be None
    "device": (str, 'the name of a device, such as "v100" (`memplan devices` lists them), or the path of a .json file'),
    "plan": (Plan, 'a plan, such as memplan.Plan.load("plan.json") or planned.plan'),
    "topology": (str | Topology, 'a shape such as "2x4", a name, the path of a .json file, or a Topology'),
    "pin": (Mapping, 'a mapping from names to "device", "host" or "recompute"'),
}
# Budgets that are asked for to find one that works. Of 300 drawn programs, what was named first was refused in three,
# of which one needed three.
_MOST_ASKED = 3


@dataclass(frozen=True)
class Request:
    """The user's request; see `memplan.jit`.

    Raises:
      BudgetError, UnknownDeviceError, MemplanError: a value that no step can be planned with.
    """

    budget: Size = None
    host_budget: Size = None
    device: str | None = None
    planner: str | Planner | None = None
    plan: Plan | None = None
    verify: str | None = "compile"
    host_state: tuple[int, ...] = ()
    split: str | bool = "auto"
    topology: Topology | str | None = None
    between_hosts: str | None = None
    pin: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.budget, 1)
        parse_bytes(self.host_budget, 1, "host budget")
        planner_named(self.planner)
        for name, (kind, form) in _FORMS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                raise MemplanError(f"{name} is {value!r:.80}; it is {form}.")
        if not all(isinstance(one, int) for one in self.host_state):
            raise MemplanError(f"host_state is {self.host_state!r:.80}; it is the position of an argument, or several.")
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise MemplanError(f"{name} is {value!r}; it is one of {', '.join(map(repr, known))}.")
        if self.plan is not None and self.pin is not None:
            raise MemplanError("plan and pin were both given; a saved plan keeps the pins that it was made with.")
        if self.pins and planner_named(self.planner) is not OWN:
            raise MemplanError("pin is kept by memplan's own planner alone; leave planner out.")
        if self.device is not None:
            _ = self.target
        if self.topology is not None:
            _ = topology_for(self.topology, 1, 1, "today")  # of whatever size, it exists

    @functools.cached_property
    def target(self) -> Target:
        """The target to compile for."""
        return target_of(self.device)

    @functools.cached_property
    def pins(self) -> tuple[Pin, ...]:
        """What `pin` asks for, or what the plan was made with."""
        if self.plan is not None:
            return self.plan.pins
        places = [where.value for where in Where]
        for name, where in (self.pin or {}).items():
            if str(where) not in places:
                known = ", ".join(map(repr, places))
                raise MemplanError(f"pin: {name!r} is pinned to {where!r}; it is one of {known}.")
        return tuple(Pin(name, Where(where)) for name, where in sorted((self.pin or {}).items()))

    @property
    def holds_state(self) -> bool:
        """May arguments be in host memory?"""
        return bool(self.host_state or (self.plan and self.plan.on_host))

    def local(self, device_bytes: int) -> Request:
        """This request for the local backend, within `device_bytes`; without its plan, which belongs to its device."""
        return replace(self, device=None, budget=device_bytes, plan=None, topology=None)


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
    return offload_state(in_slabs, inputs=held, streams=target.backend.has_own_memory)


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
    offload = functools.partial(offload_state, inputs=held, streams=target.backend.has_own_memory)
    processes = _processes(plain, target)
    same_step(processes, plain, (plain.options, request))

    def with_fewer_residuals(program: Program, excess_bytes: int, moves: bool) -> Program | None:
        # Of state on the host, each trip of a loop in one piece streams its layer.
        host_bytes = limits.host_bytes if moves else 0
        found = fewer_residuals(program, target.device, host_bytes, excess_bytes, may_segment=not held)
        return found and offload(found)

    one_gpu = target.backend.has_own_memory and plain.traced.division is None and not held

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
    attempts = Attempts(
        compiler, by_index, with_fewer_residuals, in_slabs, notify, follow, tries, target.backend.has_own_memory
    )
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
    program = trace(step, args, kwargs, options, target.backend.platform if target.described else None)
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
    if request.target.backend.has_own_memory:
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


def target_of(device: str | None) -> Target:
    """The local backend for None, else the described GPU with this name, or the device in this specification file."""
    if device is None:
        return Target(local_device(), described=False)
    if not measured.is_path(device):
        return Target(catalog.named(device), described=True)
    found = measured.load(device)
    here = is_here(found.device, found.platform, found.device_kind)
    return Target(found.device, described=not here)


def limits_of(request: Request, target: Target) -> Limits:
    """The limits in bytes. The default of the host is this machine's memory within XLA's pinned pool, or twice the
    memory of a described GPU.

    Raises BudgetError if the request makes no sense, or exceeds the pinned pool of a local GPU.
    """
    device_bytes = parse_bytes(request.budget, target.device.memory_bytes)
    if not target.backend.has_own_memory:
        return Limits(device_bytes, 0)  # host memory and device memory are the same
    if target.described:
        return Limits(device_bytes, parse_bytes(request.host_budget, 2 * target.device.memory_bytes, "host budget"))
    whole, pinned = host_memory_bytes() * 8 // 10, pools().host_limit_bytes
    host_bytes = (
        min(whole, pinned) if request.host_budget is None else parse_bytes(request.host_budget, whole, "host budget")
    )
    if host_bytes > pinned:
        raise BudgetError(
            f"the host budget of {show_bytes(host_bytes)} is above the limit of XLA's pinned pool, "
            f"{show_bytes(pinned)} per GPU. Lower the budget, or raise the limit before Python starts: "
            f"{export(HOST_LIMIT, str(-(-host_bytes >> 30)))}"
        )
    return Limits(device_bytes, host_bytes)
