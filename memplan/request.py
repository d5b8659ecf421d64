"""The user's request: checked, with its target and its limits in bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memplan.compilation.limits import Limits
from memplan.errors import BudgetError, MemplanError
from memplan.hardware import catalog, measured
from memplan.hardware.topology import Topology
from memplan.parallel.meshes import topology_for
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.registry import OWN, Planner, planner_named
from memplan.units import Size, parse_bytes, show_bytes
from memplan.xla.local import HOST_LIMIT, export, host_memory_bytes, is_here, local_device, pools
from memplan.xla.target import Target

_CHOICES = {
    "verify": ("compile", "numbers", None),
    "split": ("auto", False),
    "between_hosts": (None, "bfloat16", "float16"),
}
UNLIMITED = 2**60  # bytes; within this budget every step runs unmodified
_FORMS = {  # options that may be None: their type, and its description in errors
    "device": (str, 'the name of a device, such as "v100" (`memplan devices` lists them), or the path of a .json file'),
    "plan": (Plan, 'a plan, such as memplan.Plan.load("plan.json") or planned.plan'),
    "topology": (str | Topology, 'a shape such as "2x4", a name, the path of a .json file, or a Topology'),
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

    def __post_init__(self) -> None:
        parse_bytes(self.budget, 1)
        parse_bytes(self.host_budget, 1, "host budget")
        planner_named(self.planner)
        for name, (kind, form) in _FORMS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                raise MemplanError(f"{name} is {value!r:.80}; it is {form}.")
        if not all(isinstance(position, int) for position in self.host_state):
            raise MemplanError(f"host_state is {self.host_state!r:.80}; it is the position of an argument, or several.")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise MemplanError(f"{name} is {value!r}; it is one of {', '.join(map(repr, choices))}.")
        if self.plan is not None and self.pin is not None:
            raise MemplanError("plan and pin were both given; a saved plan keeps the pins that it was made with.")
        if self.pins and planner_named(self.planner) is not OWN:
            raise MemplanError("pin is kept by memplan's own planner alone; leave planner out.")
        if self.device is not None:
            _ = self.target
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
        kinds = [where.value for where in Where]
        for name, where in (self.pin or {}).items():
            if str(where) not in kinds:
                choices = ", ".join(map(repr, kinds))
                raise MemplanError(f"pin: {name!r} is pinned to {where!r}; it is one of {choices}.")
        return tuple(Pin(name, Where(where)) for name, where in sorted((self.pin or {}).items()))

    @property
    def holds_state(self) -> bool:
        """May arguments be in host memory?"""
        return bool(self.host_state or (self.plan and self.plan.on_host))

    def local(self, device_bytes: int) -> Request:
        """This request for the local backend, within `device_bytes`; without its plan, which belongs to its device."""
        return replace(self, device=None, budget=device_bytes, plan=None, topology=None)


def target_of(device: str | None) -> Target:
    """The local backend for None, else the described GPU with this name, or the device in this specification file."""
    if device is None:
        return Target(local_device(), described=False)
    if not measured.is_path(device):
        return Target(catalog.named(device), described=True)
    specification = measured.load(device)
    is_local = is_here(specification.device, specification.platform, specification.device_kind)
    return Target(specification.device, described=not is_local)


def limits_of(request: Request, target: Target) -> Limits:
    """The limits in bytes. The default of the host is this machine's memory within XLA's pinned pool, or twice the
    memory of a described GPU.

    Raises BudgetError if the request makes no sense, or exceeds the pinned pool of a local GPU.
    """
    device_bytes = parse_bytes(request.budget, target.device.memory_bytes)
    if not target.is_gpu:
        return Limits(device_bytes, 0)  # host memory and device memory are the same
    if target.described:
        return Limits(device_bytes, parse_bytes(request.host_budget, 2 * target.device.memory_bytes, "host budget"))
    whole = host_memory_bytes() * 8 // 10
    pinned = pools().host_limit_bytes
    if request.host_budget is None:
        return Limits(device_bytes, min(whole, pinned))
    host_bytes = parse_bytes(request.host_budget, whole, "host budget")
    if host_bytes > pinned:
        raise BudgetError(
            f"the host budget of {show_bytes(host_bytes)} is above the limit of XLA's pinned pool, "
            f"{show_bytes(pinned)} per GPU. Lower the budget, or raise the limit before Python starts: "
            f"{export(HOST_LIMIT, str(-(-host_bytes >> 30)))}"
        )
    return Limits(device_bytes, host_bytes)
