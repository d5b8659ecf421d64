"""The user's request: checks it, and resolves its target, limits, program and cache key."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.compilation import kept
from memplan.compilation.compiler import Notify, shapes_of
from memplan.compilation.limits import Limits
from memplan.errors import BudgetError, MemplanError, UnsupportedProgramError
from memplan.hardware import catalog, measured
from memplan.hardware.topology import Topology
from memplan.parallel.meshes import machine_of, processes_of, topology_for
from memplan.parallel.step import options_with_shardings
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.registry import OWN, Planner, planner_named
from memplan.planning.transforms import inputs_on_host
from memplan.program import compat
from memplan.program.constants import digests_of_constants
from memplan.program.pins import check as check_pins
from memplan.program.trace import Program, trace
from memplan.units import Size, parse_bytes, show_bytes
from memplan.xla.local import HOST_LIMIT, export, host_memory_bytes, is_here, local_device, pools
from memplan.xla.target import Target

_CHOICES = {
    "verify": ("compile", "numbers", None),
    "split": ("auto", False),
    "between_hosts": (None, "bfloat16", "float16"),
}
# Bytes of a budget within which every step runs unmodified.
UNLIMITED = 2**60
# Options that may be None: their type, and its description in errors.
_TYPES = {
    "device": (
        str,
        'the name of a device, such as "v100" (`memplan devices` lists them), or the path of a '
        ".json file",
    ),
    "plan": (Plan, 'a plan, such as memplan.Plan.load("plan.json") or planned.plan'),
    "topology": (
        str | Topology,
        'a shape such as "2x4", a name, the path of a .json file, or a Topology',
    ),
    "pin": (Mapping, 'a mapping from names to "device", "host" or "recompute"'),
}


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
    time_limit: float | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.budget, 1)
        parse_bytes(self.host_budget, 1, "host budget")
        planner_named(self.planner)
        for name, (kind, description) in _TYPES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise MemplanError(f"{name} is {value!r:.80}; it is {description}.")
        limit_s = self.time_limit
        is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
        if limit_s is not None and not (is_number and limit_s > 0):
            raise MemplanError(
                f"time_limit is {limit_s!r:.80}; it is a number of seconds above 0, or None."
            )
        if not all(isinstance(position, int) for position in self.host_state):
            raise MemplanError(
                f"host_state is {self.host_state!r:.80}; it is the position of an argument, or "
                "several."
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise MemplanError(
                    f"{name} is {value!r}; it is one of {', '.join(map(repr, choices))}."
                )
        if self.plan is not None and self.pin is not None:
            raise MemplanError(
                "plan and pin were both given; a saved plan keeps the pins that it was made with."
            )
        if self.pins and planner_named(self.planner) is not OWN:
            raise MemplanError("pin is kept by memplan's own planner alone; leave planner out.")
        if self.device is not None:
            _ = self.target  # raises if there is no such device
        if self.topology is not None:
            _ = topology_for(self.topology, 1, 1, "today")  # raises if there is no such topology

    @functools.cached_property
    def target(self) -> Target:
        """The target to compile for."""
        return target_of(self.device)

    @functools.cached_property
    def pins(self) -> tuple[Pin, ...]:
        """The pins of `pin`, or those of the plan."""
        if self.plan is not None:
            return self.plan.pins
        choices = [where.value for where in Where]
        pin = self.pin or {}
        for name, where in pin.items():
            if str(where) not in choices:
                listed = ", ".join(map(repr, choices))
                raise MemplanError(f"pin: {name!r} is pinned to {where!r}; it is one of {listed}.")
        return tuple(Pin(name, Where(where)) for name, where in sorted(pin.items()))

    @property
    def pins_on_target(self) -> tuple[Pin, ...]:
        """The pins as the target can follow them.

        Host memory and device memory of a CPU are the same, so values pinned to the host stay on
        the device.
        """
        if self.target.backend.has_own_memory:
            return self.pins
        to_device = {Where.HOST: Where.DEVICE}
        return tuple(replace(pin, where=to_device.get(pin.where, pin.where)) for pin in self.pins)

    @property
    def holds_state(self) -> bool:
        """May arguments be in host memory?"""
        return bool(self.host_state or (self.plan and inputs_on_host(self.plan.transforms)))

    @property
    def unlimited(self) -> Request:
        """This request without a limit of bytes and without slabs, so that nothing is planned."""
        return replace(self, budget=UNLIMITED, split=False)

    def local(self, device_bytes: int) -> Request:
        """This request for the local backend, within `device_bytes`.

        It has no plan and no topology, which belong to the other device.
        """
        return replace(self, device=None, budget=device_bytes, plan=None, topology=None)


def target_of(device: str | None) -> Target:
    """The target for a device.

    Args:
      device: the name of a GPU to describe, or the path of a specification file; None is the local
        backend.
    """
    if device is None:
        return Target(local_device(), described=False)
    if not measured.is_path(device):
        return Target(catalog.named(device), described=True)
    specification = measured.load(device)
    is_local = is_here(specification.device, specification.platform, specification.device_kind)
    return Target(specification.device, described=not is_local)


def limits_of(request: Request, target: Target) -> Limits:
    """The limits of a request on a target, in bytes.

    The default device limit is the memory of jax's pool: on a described GPU what the pool would
    take there in this environment, 75 % unless `XLA_CLIENT_MEM_FRACTION` says otherwise. The
    default host limit is twice the memory of a described GPU. On this machine it is 80 % of
    the host's memory, or XLA's pinned pool if that is smaller.

    Raises:
      BudgetError: the budget is invalid, or exceeds the pinned pool of a local GPU.
    """
    memory_bytes = target.device.memory_bytes
    device_bytes = parse_bytes(request.budget, memory_bytes)
    if not target.backend.has_own_memory:
        return Limits(device_bytes, 0)  # host memory and device memory are the same
    if target.described:
        host_bytes = parse_bytes(request.host_budget, 2 * memory_bytes, "host budget")
        share = pools().share if target.backend.pools_memory else 1.0
        if request.budget is not None or share == 1:
            return Limits(device_bytes, host_bytes)
        pool = pools().of_device(memory_bytes, share)
        return Limits(pool.limit_bytes, host_bytes, share)
    usable_bytes = host_memory_bytes() * 8 // 10
    pinned_bytes = pools().host_limit_bytes
    if request.host_budget is None:
        return Limits(device_bytes, min(usable_bytes, pinned_bytes))
    host_bytes = parse_bytes(request.host_budget, usable_bytes, "host budget")
    if host_bytes > pinned_bytes:
        gib = -(-host_bytes >> 30)
        raise BudgetError(
            f"the host budget of {show_bytes(host_bytes)} is above the limit of XLA's pinned pool, "
            f"{show_bytes(pinned_bytes)} per GPU. Lower the budget, or raise the limit before "
            f"Python starts: {export(HOST_LIMIT, str(gib))}"
        )
    return Limits(device_bytes, host_bytes)


def traced(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Program:
    """The step as a program, on the machine that runs its partitions.

    Raises:
      BudgetError, UnknownDeviceError: the request is invalid.
      MemplanError, UnsupportedProgramError: see `trace` and `check_pins`.
      MemplanError: there is a time limit, and the step runs in several processes.
      TopologyError: the topology does not fit the step's devices.
    """
    target = request.target
    _ = limits_of(request, target)  # raises for an invalid request before the step is traced
    notify("tracing", None)
    args, kwargs = shapes_of(args, kwargs)
    options = options_with_shardings(step, args, kwargs, options)
    program = trace(step, args, kwargs, options, target.absent)
    if request.pins:
        check_pins(program.traced.jaxpr, request.pins)
        program = replace(program, pins=request.pins_on_target)
    division = program.traced.division
    if division is None:
        return program
    if not target.backend.divides_steps:
        raise UnsupportedProgramError(
            f"the step runs on {division.count} devices, and memplan plans for one "
            f"{target.device.name} alone: it has no rules yet for the collectives that XLA writes "
            "for it. Plan the step of one device, without a mesh and without shardings."
        )
    if request.time_limit is not None and len(processes_of(division, target.described)) > 1:
        raise MemplanError(
            "time_limit cannot end planning in several processes: their clocks differ, so they "
            "would compile different programs. Leave it out; or plan the step in one process for "
            "the same device (device=), save the plan, and pass it to all (plan=)."
        )
    return replace(program, machine=machine_of(division, request.topology, target.described))


def cache_key(program: Program, request: Request) -> str:
    """The key of a plan in jax's persistent cache: a digest of everything that it depends on.

    It is "" if the plan is not cached: the cache is off, or a second start needs the step or XLA.
    A step over several devices needs XLA, because its collectives are compared between processes
    and unexpected gathers are reported.
    """
    target = request.target
    if request.plan is not None or request.verify == "numbers" or target.described:
        return ""
    if planner_named(request.planner) is not OWN:
        return ""
    if program.machine is not None or compat.disk_cache() is None:
        return ""
    return kept.digest(
        program.digest,
        *digests_of_constants(program.traced.jaxpr),
        program.options.get("compiler_options"),
        limits_of(request, target),
        request.host_state,
        request.split,
        request.verify,
        request.pins,
        target.device,
        os.environ.get("XLA_FLAGS"),
    )
