"""What the compiler calls between its scheduling and its code: read the module, plan, write, judge."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from memplan.compilation.limits import Limits, Reserve
from memplan.compilation.plans import Agree, Plans
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.planning.packing import pack
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.planning.schedule import Schedule
from memplan.verify.same_module import judge
from memplan.xla.host_copies import copy_slices
from memplan.xla.module import read_module
from memplan.xla.rewrites.early_copies import copy_early
from memplan.xla.write import as_it_stands, write


@dataclass(frozen=True)
class PlannedModule:
    """What was made of a module.

    Attributes:
      plain: as XLA scheduled it.
      base: what was planned: the same, or its rewrite (`ScheduledModule.rewrite`).
      plan: what it was made into; None where it went through as it is.
      schedule: the plan, by the numbers of the base's problem.
      written: the module that was handed back.
      fits: by the prediction.
      predicted_bytes, predicted_host_bytes: device and host bytes.
      planning_s: seconds from the module that was read to a plan and its layout, however the plan was come by; 0 where
        the module went through as it is.
    """

    plain: ScheduledModule
    base: ScheduledModule
    plan: Plan | None = None
    schedule: Schedule = ()
    written: ScheduledModule | None = None
    fits: bool = True
    predicted_bytes: int = 0
    predicted_host_bytes: int = 0
    planning_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """No plan within the budget takes less time."""
        return min(self.plain.replay.step_s, self.base.replay.step_s)

    @property
    def result(self) -> ScheduledModule:
        """What is compiled."""
        return self.written or self.plain


@dataclass
class Callback:
    """Called with the text of a scheduled module; `planned` tells afterwards what was made of it.

    Attributes:
      device: that the module is compiled for.
      limits: of the whole step; `reserve` is left free of them.
      planner: makes the plan; `follow`: one to carry out instead.
      agree: brings all processes of the step to one plan.
      streams: the module's own loops copy, and do so beside all of a trip.
    """

    device: Device
    limits: Limits
    reserve: Reserve
    topology: Topology | None
    planner: Planner
    follow: Plan | None
    agree: Agree
    streams: bool = False
    _planned: PlannedModule | None = field(default=None, init=False)

    @property
    def planned(self) -> PlannedModule:
        assert self._planned is not None, "the module was not compiled"
        return self._planned

    def __call__(self, text: str) -> str | None:
        with _without_collecting():
            module = scheduled = read_module(text)
            if self.streams:
                module = copy_early(scheduled)
                judge(scheduled, module)
            module = copy_slices(module, self.device)
            plain = ScheduledModule(module, self.device, self.topology)
            budget = self.limits.device_bytes - self.reserve.device_bytes
            if self.follow is None and plain.device_bytes <= budget:
                self._planned = PlannedModule(plain, plain, predicted_bytes=plain.device_bytes)
                return as_it_stands(module) if module is not scheduled else None
            return self._rewrite(plain, budget)

    def _rewrite(self, plain: ScheduledModule, budget: int) -> str:
        started = time.perf_counter()
        plan = self.follow or self._plan(plain, budget)
        plan.check(plain.module.fingerprint)
        base = plain.rewrite(plan.room_nbytes, plan.handed_on)
        schedule = plan.schedule(base.problem)
        packing = pack(base.problem, schedule)
        planning_s = time.perf_counter() - started
        text = write(base.module, base.problem, schedule)
        written = ScheduledModule(read_module(text, base.module), self.device, self.topology)
        judge(plain.module, written.module)
        predicted = plain.resident_bytes + packing.nbytes
        self._planned = PlannedModule(
            plain,
            base,
            plan,
            schedule,
            written,
            fits=predicted <= budget,
            predicted_bytes=predicted,
            predicted_host_bytes=packing.host_nbytes,
            planning_s=planning_s,
        )
        return text

    def _plan(self, plain: ScheduledModule, budget: int) -> Plan:
        return Plans(plain, budget, self.limits.host_bytes - self.reserve.host_bytes, self.planner).agree(self.agree)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """A module is a million objects in no cycles: looking for those takes a sixth of the time that a plan takes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
