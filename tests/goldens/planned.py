"""Stored modules, given to the planner as XLA's hook gives them, without a compiler.

No other file of the goldens knows how the hook, the callback and the shaping are called.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memplan.compilation.callback import Callback, PlannedModule
from memplan.compilation.limits import Headroom, Limits
from memplan.compilation.scheduled import ScheduledModule
from memplan.compilation.shaping import Shaping
from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.hardware.topology import topology_named
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.registry import OWN
from memplan.xla.module import Module
from memplan.xla.serialize import serialize

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parent.parent
UNLIMITED = 2**60  # bytes


@dataclass(frozen=True)
class Case:
    """A stored module, and all that the planner is told of it.

    Attributes:
      key: NAME-DEVICE.
      file: of the scheduled module, from the root of the repository.
      partitioned_file: of the module before it was scheduled; "" for one device.
      device: name of the described GPU, or "cpu".
      jax: release that compiled it.
      topology: of the machine, and the device of every partition; "" for one device.
      asked_sizes: elements on one device of arrays that the step says how to divide.
      pins: name and place.
      in_slabs: its loops copy beside all of a trip.
      plain_bytes: device bytes without a plan.
      budgets: device bytes by their share of those.
    """

    key: str
    file: str
    device: str
    jax: str
    platform: str
    partitioned_file: str = ""
    topology: str = ""
    devices: tuple[int, ...] = ()
    asked_sizes: tuple[int, ...] = ()
    pins: tuple[tuple[str, str], ...] = ()
    in_slabs: bool = False
    plain_bytes: int = 0
    budgets: Mapping[str, int] | None = None

    @cached_property
    def proto(self) -> bytes:
        return _unpacked(self.file)

    @cached_property
    def partitioned(self) -> bytes | None:
        return _unpacked(self.partitioned_file) if self.partitioned_file else None

    @property
    def hardware(self) -> Device:
        if self.device == "cpu":
            return catalog.local_cpu(2, 2**33)
        return catalog.named(self.device)

    @property
    def machine(self) -> Machine | None:
        return Machine(topology_named(self.topology), self.devices) if self.topology else None


@dataclass(frozen=True)
class Planned:
    """What was planned for a module, and what XLA is handed instead: itself without a plan."""

    module: PlannedModule
    proto: bytes


def _unpacked(file: str) -> bytes:
    return gzip.decompress((REPOSITORY / file).read_bytes())


def cases() -> Mapping[str, Case]:
    """All stored cases by key."""
    stored = json.loads((FOLDER / "cases.json").read_text())
    tuples = ("devices", "asked_sizes")
    return {
        key: Case(
            key,
            **{
                name: tuple(value) if name in tuples else value
                for name, value in entry.items()
                if name != "pins"
            },
            pins=tuple((pin[0], pin[1]) for pin in entry["pins"]),
        )
        for key, entry in stored.items()
    }


def plan_module(case: Case, budget_bytes: int) -> Planned:
    """The module of a case, planned within so many bytes as `memplan.xla.hook` has it planned."""
    device = case.hardware
    host_bytes = 0 if case.device == "cpu" else 2 * device.memory_bytes
    callback = Callback(
        device,
        Limits(budget_bytes, host_bytes),
        Headroom(),
        case.machine,
        OWN,
        None,
        _alone,
        overlap_loop_copies=case.in_slabs and case.device != "cpu",
        pins=tuple(Pin(name, Where(where)) for name, where in case.pins),
    )
    module = callback(Module.read(case.proto))
    return Planned(callback.planned, case.proto if module is None else serialize(module))


def shape_module(case: Case, between_hosts: str | None) -> bytes | None:
    """The partitioned module of a case with its collectives shaped; None if it stays."""
    assert case.partitioned is not None
    module = _shaping(case, between_hosts)(Module.read(case.partitioned, scheduled=False))
    return None if module is None else serialize(module)


def scheduled_module(case: Case) -> ScheduledModule:
    """The module of a case as XLA scheduled it."""
    pins = tuple(Pin(name, Where(where)) for name, where in case.pins)
    return ScheduledModule(Module.read(case.proto), case.hardware, case.machine, pins)


def _shaping(case: Case, between_hosts: str | None) -> Shaping:
    machine = case.machine
    assert machine is not None
    sizes = frozenset(case.asked_sizes)
    return Shaping(machine, case.hardware.backend, between_hosts, sizes)


def _alone(fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
    """The agreement of a process that is alone."""
    return make()
