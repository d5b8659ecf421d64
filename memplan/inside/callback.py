"""Inside a compilation, between XLA's scheduling and its code: read the module, plan, write, judge."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.hardware.topology import Topology
from memplan.inside import plan_cache
from memplan.inside.reading import Reading
from memplan.planning.packing import live_nbytes, pack
from memplan.planning.plan import Plan, named
from memplan.planning.registry import PLANNERS, Planner
from memplan.planning.schedule import Schedule
from memplan.planning.search.planner import Found, rank, repeated
from memplan.verify.same_module import judge
from memplan.xla.module import read_module
from memplan.xla.rewrites.extra_outputs import prices
from memplan.xla.write import write

_LITTLE = 1.1  # of a plain step: a plan that takes no more is taken. Where holes cost much, handing on can cost more:
# ResNet-50 at 30 % took 175 ms so and 144 without, the 3D U-Net in bfloat16 at half its bytes 2.9 ms and 2.6
Agree = Callable[[str, str, Callable[[], Plan]], Plan]
"""(fingerprint of the module, key of all else, makes a plan) -> the plan that all processes follow."""


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may take on the device and on the host."""

    device_bytes: int
    host_bytes: int

    def allow(self, device_bytes: int, host_bytes: int) -> bool:
        return device_bytes <= self.device_bytes and host_bytes <= self.host_bytes


@dataclass(frozen=True)
class Made:
    """What was made of a module.

    Attributes:
      plain: as XLA scheduled it.
      base: what was planned: the same, or its variant with cheap values made again inside of their readers, and with
        kernels that crowd the device in parts.
      plan: what it was made into; None where it went through as it is.
      schedule: the plan, by the numbers of the base's problem.
      planned: the module that was handed back.
      fits: by the prediction.
      predicted_bytes, predicted_host_bytes: device and host bytes.
      planning_s: seconds from the module that was read to a plan and its layout, however the plan was come by; 0 where
        the module went through as it is.
    """

    plain: Reading
    base: Reading
    plan: Plan | None = None
    schedule: Schedule = ()
    planned: Reading | None = None
    fits: bool = True
    predicted_bytes: int = 0
    predicted_host_bytes: int = 0
    planning_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """No plan within the budget takes less time."""
        return min(self.plain.traffic.step_s, self.base.traffic.step_s)

    @property
    def result(self) -> Reading:
        """What is compiled."""
        return self.planned or self.plain


@dataclass
class Inside:
    """What the compiler calls with the scheduled module; `made` tells afterwards what was made of it.

    Attributes:
      device: that the module is compiled for.
      limits: of the whole step.
      planner: makes the plan; `follow`: one to carry out instead.
      agree: brings all processes of the step to one plan.
      reserve_bytes, reserve_host_bytes: to be left free: what an earlier compilation took beyond its prediction.
    """

    device: Device
    limits: Limits
    topology: Topology | None
    planner: Planner
    follow: Plan | None
    agree: Agree
    reserve_bytes: int = 0
    reserve_host_bytes: int = 0
    made: Made | None = field(default=None, init=False)

    def __call__(self, text: str) -> str | None:
        with _without_collecting():
            return self._rewritten(text)

    def _rewritten(self, text: str) -> str | None:
        plain = Reading(read_module(text), self.device, self.topology)
        budget = self.limits.device_bytes - self.reserve_bytes
        if self.follow is None and plain.device_bytes <= budget:
            self.made = Made(plain, plain, predicted_bytes=plain.device_bytes)
            return None
        started = time.perf_counter()
        plan = self.follow or self._agreed(plain, budget)
        plan.check(plain.module.fingerprint)
        base = plain.remade(plan.room_nbytes, plan.handed_on)
        schedule = plan.schedule(base.problem)
        packing = pack(base.problem, schedule)
        planning_s = time.perf_counter() - started
        written = write(base.module, base.problem, schedule)
        planned = Reading(read_module(written, base.module), self.device, self.topology)
        judge(plain.module, planned.module)
        predicted = plain.resident_bytes + packing.nbytes
        self.made = Made(
            plain,
            base,
            plan,
            schedule,
            planned,
            fits=predicted <= budget,
            predicted_bytes=predicted,
            predicted_host_bytes=packing.host_nbytes,
            planning_s=planning_s,
        )
        return written

    def _agreed(self, plain: Reading, budget: int) -> Plan:
        host = self.limits.host_bytes - self.reserve_host_bytes
        fingerprint = plain.module.fingerprint
        name = plan_cache.key(fingerprint, self.planner.name, budget, host, self.device, self.topology)
        return self.agree(fingerprint, name, functools.partial(self._plan, plain, budget, host, name))

    def _plan(self, plain: Reading, budget: int, host: int, name: str) -> Plan:
        """A new plan, or a kept one of memplan's own planners: another's code may change under its name."""
        if PLANNERS.get(self.planner.name) is not self.planner:
            return self._new_plan(plain, budget, host)
        plan = plan_cache.find(name)
        if plan is None:
            plan = self._new_plan(plain, budget, host)
            plan_cache.keep(name, plan)
        return plan

    def _new_plan(self, plain: Reading, budget: int, host: int) -> Plan:
        """For the room that the budget leaves, or else for the smallest.

        Where that one fits, kernels in its parts are planned within the budget. It is the same for every budget: errors
        tell all of the same smallest that works.
        """
        copy_s = functools.partial(copy_seconds, device=self.device) if host > 0 else None
        room_nbytes = budget - plain.resident_bytes

        def planned(parts_nbytes: int, wanted_nbytes: int, handed: Sequence[str] = ()) -> tuple[Found, Plan]:
            problem = plain.remade(parts_nbytes, handed).timed
            found = self.planner.plan(problem, wanted_nbytes, host, copy_s)
            actions, fingerprint = named(problem, found.schedule), plain.module.fingerprint
            plan = Plan(actions, fingerprint, self.planner.name, self.device.name, (), (), parts_nbytes, tuple(handed))
            return found, plan

        handed = self._handed_on(plain.remade(room_nbytes, whole=True), room_nbytes)
        ways = [planned(room_nbytes, room_nbytes, handed)] if handed else []
        if not ways or not ways[0][0].fits or ways[0][0].seconds > _LITTLE * plain.traffic.step_s:
            ways.append(planned(room_nbytes, room_nbytes))
        found, plan = min(ways, key=lambda way: rank(way[0]))
        if found.fits:
            return plan
        smallest = planned(0, 0)
        if smallest[0].nbytes > room_nbytes:
            return smallest[1]
        _, plan = min(smallest, planned(0, room_nbytes), key=lambda one: (one[0].nbytes > room_nbytes, one[0].seconds))
        return plan

    def _handed_on(self, base: Reading, room_nbytes: int) -> Sequence[str]:
        """Values to be handed on: those that a first plan makes again, at the price of that."""
        if self.device.target is None:
            return ()
        problem = base.timed
        cheaper = prices(base.module, problem, room_nbytes, live_nbytes(problem).tolist())
        if not cheaper:
            return ()
        maker = {buffer.name: buffer.maker for buffer in problem.buffers if buffer.name in cheaper}
        share = {maker[name]: price for name, price in cheaper.items()}
        kernels = (replace(one, seconds=one.seconds * share.get(n, 1.0)) for n, one in enumerate(problem.kernels))
        again = repeated(replace(problem, kernels=tuple(kernels)), room_nbytes)
        return [name for name in cheaper if maker[name] in again]


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
