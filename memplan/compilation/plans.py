"""A plan for a scheduled module: one that all processes agree on, that is kept on disk, or a new one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan.compilation import plan_cache
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.roofline import copy_seconds
from memplan.planning.packing import live_nbytes
from memplan.planning.plan import Plan, name_actions
from memplan.planning.registry import OWN, Planner
from memplan.planning.schedule import Solution, rank
from memplan.planning.search.planner import recomputed_kernels
from memplan.xla.rewrites.extra_outputs import output_costs

_LITTLE = (
    1.1  # of a plain step: a plan that takes no more is taken. Where holes cost much, extra outputs can cost more:
)
# ResNet-50 at 30 % took 175 ms so and 144 without, the 3D U-Net in bfloat16 at half its bytes 2.9 ms and 2.6
Agree = Callable[[str, str, Callable[[], Plan]], Plan]
"""(fingerprint of the module, key of all else, makes a plan) -> the plan that all processes follow."""


@dataclass(frozen=True)
class Plans:
    """Plans for one module."""

    plain: ScheduledModule
    budget_bytes: int  # of the whole step, on the device
    host_bytes: int  # for what is offloaded
    planner: Planner

    def agree(self, agree: Agree) -> Plan:
        """The one that all processes of the step follow."""
        plain, fingerprint = self.plain, self.plain.module.fingerprint
        name = plan_cache.key(
            fingerprint, self.planner.name, self.budget_bytes, self.host_bytes, plain.device, plain.topology
        )
        return agree(fingerprint, name, functools.partial(self.find_or_make, name))

    def find_or_make(self, name: str) -> Plan:
        """A kept plan of memplan's own planners, else a new one: another's code may change under its name."""
        if self.planner is not OWN:
            return self.make()
        plan = plan_cache.find(name)
        if plan is None:
            plan = self.make()
            plan_cache.keep(name, plan)
        return plan

    def make(self) -> Plan:
        """For the room that the budget leaves, or else for the smallest.

        Where that one fits, its split kernels are planned within the budget. It is the same for every budget: errors
        tell all of the same smallest that works.
        """
        plain, room_nbytes = self.plain, self.budget_bytes - self.plain.resident_bytes
        extra = self._extra_outputs(plain.rewrite(room_nbytes, whole=True), room_nbytes)
        ways = [self._plan(room_nbytes, room_nbytes, extra)] if extra else []
        if not ways or not ways[0][0].fits or ways[0][0].seconds > _LITTLE * plain.replay.step_s:
            ways.append(self._plan(room_nbytes, room_nbytes))
        found, plan = min(ways, key=lambda way: rank(way[0]))
        if found.fits:
            return plan
        smallest = self._plan(0, 0)
        if smallest[0].nbytes > room_nbytes:
            return smallest[1]
        ways = [smallest, self._plan(0, room_nbytes)]
        return min(ways, key=lambda way: (way[0].nbytes > room_nbytes, way[0].seconds))[1]

    def _plan(self, rewrite_nbytes: int, budget_nbytes: int, extra: Sequence[str] = ()) -> tuple[Solution, Plan]:
        """For the module as it is rewritten for some room, within a budget for temporaries."""
        device = self.plain.device
        copy_s = functools.partial(copy_seconds, device=device) if self.host_bytes > 0 else None
        problem = self.plain.rewrite(rewrite_nbytes, extra).timed_problem
        found = self.planner.plan(problem, budget_nbytes, self.host_bytes, copy_s)
        actions, fingerprint = name_actions(problem, found.schedule), self.plain.module.fingerprint
        plan = Plan(actions, fingerprint, self.planner.name, device.name, (), (), rewrite_nbytes, tuple(extra))
        return found, plan

    def _extra_outputs(self, base: ScheduledModule, room_nbytes: int) -> Sequence[str]:
        """Values that a first plan computes again, at the price that they have as extra outputs."""
        if base.device.target is None:
            return ()
        problem = base.timed_problem
        cheaper = output_costs(base.module, problem, room_nbytes, live_nbytes(problem).tolist())
        if not cheaper:
            return ()
        maker = {buffer.name: buffer.maker for buffer in problem.buffers if buffer.name in cheaper}
        share = {maker[name]: price for name, price in cheaper.items()}
        kernels = (replace(one, seconds=one.seconds * share.get(n, 1.0)) for n, one in enumerate(problem.kernels))
        recomputed = recomputed_kernels(replace(problem, kernels=tuple(kernels)), room_nbytes)
        return [name for name in cheaper if maker[name] in recomputed]
