"""Candidates for one step under one budget: plan, rewrite, compile, learn, repeat; the fastest that fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.candidates import Candidate
from memplan.compiling import Compiling, compile_plain
from memplan.errors import InfeasibleBudgetError, PlanMismatchError
from memplan.looping import ways
from memplan.planning.budget import show_bytes
from memplan.planning.cost import copy_seconds
from memplan.planning.floor import Floor, floor
from memplan.planning.graph import Graph
from memplan.planning.least import least_seconds
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Planner, Proposal
from memplan.planning.planners.registry import planner_named
from memplan.planning.unfold import keep_everything
from memplan.program.host_state import with_state_on_host
from memplan.program.loops import with_loops
from memplan.xla.target import HIDES_LATENCY, XLA_LIMIT, Target, xla_rematerialization
from memplan.program.trace import Program
from memplan.refining import Notify, Refining

_XLA_ATTEMPTS = 3  # limits given to XLA's own rematerialization
_OTHER = "greedy"  # the planner that is asked where the first one finds nothing, and to use the host
_LOOP_ATTEMPTS, _MOVING_LOOP_ATTEMPTS = 4, 3  # ways to stack residuals, compiled; those that use the host
_NEARLY = 1.25  # other residuals predicted to miss by less than this are compiled all the same
_NEAR = 1.05  # what the plan for the least memory misses by more, no other plan reaches
_FAR = 1.25  # nor does any other way, XLA's own rematerialization among them
_SQUEEZED = 1.5  # of XLA's own limit: a step that still takes more has been rematerialized as far as XLA can


@dataclass
class Search:
    """Candidates, compiled one after the other; what the compiler says of one goes into the next.

    Attributes:
      compiling: the step.
      budget, host_budget: bytes.
    """

    compiling: Compiling
    budget: int
    host_budget: int
    planner: Planner
    notify: Notify
    tried: list[Candidate] = field(default_factory=list)

    @property
    def program(self) -> Program:
        return self.compiling.program

    @property
    def graph(self) -> Graph:
        return self.compiling.graph

    @property
    def target(self) -> Target:
        return self.compiling.target

    def plain(self) -> Candidate:
        """The unmodified step, compiled when it is first asked for."""
        return self.compiling.plain()

    def best(self, verify: str | None) -> Candidate:
        """The fastest candidate that the compiler measured inside the budget."""
        if verify is None:
            return self.unverified()
        if self.budget >= self.lowest.nbytes:
            self.own()
            self.tried.extend(self.rematerialized())
        fitting = [candidate for candidate in self.tried if self.fits(candidate)]
        if not fitting:
            resort = self.last_resort
            if not self.fits(resort):
                raise self.infeasible(resort.device_bytes)
            return resort
        return min(fitting, key=lambda candidate: (candidate.step_s or 0.0, candidate.device_bytes))

    def likely(self) -> Iterator[Candidate]:
        """What fits first of all, for whoever asks only whether anything does."""
        if not self.program.held and self.compiling.straight_timeline.peak_nbytes <= self.budget:
            yield self.plain()
        yield self.least

    def by_memory(self) -> Iterator[Candidate]:
        """Whatever may fit, in the order of the memory that it hopes to need."""
        resort = self.last_resort
        yield resort
        if self.budget < self.lowest.nbytes or resort.device_bytes > _FAR * self.budget:
            return
        least = resort.device_bytes
        for candidate in self.rematerialized():
            yield candidate
            if candidate.device_bytes >= least:
                break
            least = candidate.device_bytes
        if least <= _NEAR * self.budget:
            yield from self.looped()
            yield from self.nearest.planned()
            yield from self.nearest.evicted()

    def in_segments(self) -> Candidate:
        """For a step that fits as it is but waits for other devices: the faster of it and the same in segments.

        Fences keep the order in which gradients are made, so that their sums go early.
        """
        plan = keep_everything(self.refining(self.planner).problem(self.budget).layout(), self.target.device.name)
        candidate = self.compile(replace(plan, planner="segments"), self.compiling.simulated(plan).peak_nbytes)
        self.tried.append(candidate)
        faster = (candidate.step_s or math.inf) < (self.plain().step_s or math.inf)
        return candidate if faster and self.fits(candidate) else self.plain()

    def follow(self, plan: Plan) -> Candidate:
        """A plan that the user brings."""
        written = self.program.as_written
        looped = with_loops(written, plan.loops) if plan.loops else written
        search = self.on(with_state_on_host(looped, plan.held))
        plan.check(search.graph)
        moves = plan.held or any(residuals and residuals.moved for residuals in plan.loops)
        candidate = search.compile(plan, search.compiling.simulated(plan).peak_nbytes, HIDES_LATENCY if moves else None)
        self.tried.append(candidate)
        if candidate.dropped:
            raise PlanMismatchError(
                f"the compiler does not carry out this plan: {'; '.join(candidate.dropped[:3])}. It was made for "
                "another device or version of jaxlib, or by hand. Plan again."
            )
        if not self.fits(candidate):
            raise self.infeasible(candidate.device_bytes)
        return candidate

    def fits(self, candidate: Candidate) -> bool:
        """Within both budgets, and doing what its plan says."""
        return candidate.fits(self.budget, self.host_budget)

    def refining(self, planner: Planner) -> Refining:
        return Refining(self.compiling, self.budget, self.host_budget, planner, self.notify)

    def on(self, program: Program) -> Search:
        """The same search for the step with its loops rewritten."""
        return replace(self, compiling=replace(self.compiling, program=program), tried=[])

    @functools.cached_property
    def ways(self) -> list[Search]:
        """Searches for the step with fewer residuals, all on the device; the fewest first."""
        return self.looping(moves=False) if not self.program.loops else []

    @functools.cached_property
    def moving_ways(self) -> list[Search]:
        """The same with residuals on the host; the fewest on the device first."""
        return self.looping(moves=True) if self.ways and self.host_budget else []

    def looping(self, moves: bool) -> list[Search]:
        """Searches for the step with other residuals in its loops, and its state where it is."""
        found = ways(self.program.as_written, self.target.device, moves)
        return [self.on(with_state_on_host(program, self.program.held)) for program in found]

    @functools.cached_property
    def lowest(self) -> Floor:
        """The floor, whatever the loops stack."""
        return min(
            (floor(search.graph) for search in (self, *self.ways, *self.moving_ways)), key=lambda found: found.nbytes
        )

    @functools.cached_property
    def least_proposed(self) -> Proposal:
        """The planner's way to the floor; nothing is compiled for it.

        It is the same whatever the budget is: so a budget that an error promises to work is kept when it is tried.
        """
        return self.nearest.refining(self.planner).asked(self.lowest.nbytes)

    @functools.cached_property
    def least(self) -> Candidate:
        """That plan, compiled."""
        candidate = self.nearest.compile(self.least_proposed.plan, self.least_proposed.timeline.peak_nbytes)
        self.tried.append(candidate)
        return candidate

    @property
    def last_resort(self) -> Candidate:
        """The plan for the floor, or the unmodified step where that takes less.

        The unmodified step knows nothing of state on the host.
        """
        if self.program.held:
            return self.least
        plain = self.plain()
        if self.least_proposed.timeline.peak_nbytes >= plain.device_bytes:
            return plain
        small = self.least.device_bytes < plain.device_bytes and self.least.host_bytes <= self.host_budget
        return self.least if small else plain

    @property
    def least_s(self) -> float:
        """Seconds that no plan beats; of what the budget costs, nothing is known where loops can stack less."""
        budget = self.plain().device_bytes if self.ways else self.budget
        return least_seconds(self.graph, self.target.device, budget, self.host_budget)

    @property
    def nearest(self) -> Search:
        """The search whose step stacks least on the device."""
        return next(iter((*self.moving_ways, *self.ways)), self)

    def own(self) -> list[Candidate]:
        """All candidates that memplan's planners come to."""
        self.tried.extend(self.looped())
        if not any(map(self.fits, self.tried)):
            search = replace(self.nearest, tried=self.tried)
            for way in (search.planned, search.evicted, search.moved):
                self.tried.extend(way())
        return self.tried

    def looped(self) -> Iterator[Candidate]:
        """The step with other residuals in its loops and no fences: what leaves most to the compiler."""
        for searches, most in ((self.ways, _LOOP_ATTEMPTS), (self.moving_ways, _MOVING_LOOP_ATTEMPTS)):
            flags = HIDES_LATENCY if self.program.held or searches is self.moving_ways else None
            hopeful = [(search, search.compiling.straight_timeline.peak_nbytes) for search in searches]
            hopeful = [(search, nbytes) for search, nbytes in hopeful if nbytes <= _NEARLY * self.budget]
            for search, nbytes in hopeful[:: max(1, -(-len(hopeful) // most))]:
                self.notify("compiling other residuals of loops", None)
                yield search.compile(search.compiling.straight, nbytes, flags)

    def planned(self) -> Iterator[Candidate]:
        """Plans of the planner that was asked for."""
        return self.refining(self.planner).candidates()

    def evicted(self) -> Iterator[Candidate]:
        """Plans of the other planner, where no plan fits so far: what the compiler adds depends on the plan."""
        if self.planner.name == _OTHER or any(map(self.fits, self.tried)):
            return iter(())
        return self.refining(planner_named(_OTHER)).candidates()

    def moved(self) -> Iterator[Candidate]:
        """Plans that move values to the host, where their copies could overlap and they be the fastest.

        How far XLA lets copies overlap is known once it has compiled them; planners count them in full.
        """
        needed_s = copy_seconds(self.plain().device_bytes - self.budget, self.target.device)
        if not self.host_budget or self.planner.name == _OTHER or needed_s > (self.plain().step_s or 0.0):
            return iter(())
        fastest = min((one.step_s or 0.0 for one in self.tried if self.fits(one)), default=math.inf)
        return self.refining(planner_named(_OTHER)).candidates(
            lambda told: told.host_peak_nbytes > 0 and told.step_s < fastest
        )

    def compile(self, plan: Plan, predicted: int, flags: Mapping[str, Any] | None = None) -> Candidate:
        self.notify("compiling the planned step", None)
        return self.compiling.planned(plan, predicted, flags)

    def rematerialized(self) -> Iterator[Candidate]:
        """The unmodified step with XLA's own rematerialization, its limit set to the budget and then below it.

        It knows nothing of state on the host.
        """
        if not self.target.is_gpu or self.program.held:
            return
        if self.plain().device_bytes > _SQUEEZED * max(self.budget, XLA_LIMIT * self.target.device.memory_bytes):
            return
        plain, executable = self.compiling.plain, self.plain().executable
        resident = executable.memory.resident_bytes if executable else 0
        limit = self.budget
        for _ in range(_XLA_ATTEMPTS):
            self.notify("compiling with XLA's own rematerialization", None)
            target, flags = xla_rematerialization(self.target, limit, resident)
            candidate = compile_plain(self.program, target, plain.args, plain.kwargs, flags, "xla", with_schedule=True)
            yield candidate
            if self.fits(candidate) or candidate.device_bytes > 1.25 * self.budget:
                return
            limit -= int(1.2 * (candidate.device_bytes - self.budget))

    def unverified(self) -> Candidate:
        """The planner's word alone (`verify=None`)."""
        for search in (*self.ways[::-1], *self.moving_ways[::-1]):
            timeline = search.compiling.straight_timeline
            if timeline.peak_nbytes <= self.budget:
                return search.compiling.believed(search.compiling.straight, timeline)
        search = self.nearest
        proposal = search.refining(self.planner).asked(self.budget)
        if not proposal.fits:
            proposal = self.least_proposed
        timeline = proposal.timeline
        if timeline.peak_nbytes > self.budget or timeline.host_peak_nbytes > self.host_budget:
            raise self.infeasible(timeline.peak_nbytes)
        return search.compiling.believed(proposal.plan, timeline, proposal.gap_s)

    @property
    def elsewhere(self) -> str:
        """What the host could still take."""
        larger = f"or a larger host budget (now {show_bytes(self.host_budget)})"
        return larger if self.program.held else f"parameters and optimizer state on the host (host_state), {larger}"

    def infeasible(self, smallest: int) -> InfeasibleBudgetError:
        """Says the floor, what sets it, and a budget that works."""
        lowest, where = self.lowest, self.lowest.where
        if self.budget < lowest.nbytes:
            what = f"less than {where} alone needs"
        else:
            what = "above the floor, yet no plan that was compiled keeps it"
        return InfeasibleBudgetError(
            f"a device budget of {show_bytes(self.budget)} is {what}. The floor is {show_bytes(lowest.nbytes)}, set by "
            f"{where}; the smallest budget found to work on {self.target.device.name} is {smallest} bytes "
            f"({show_bytes(smallest)}). Try that budget, a smaller batch or image, a narrower dtype, {self.elsewhere}.",
            floor_bytes=min(lowest.nbytes, smallest),
            smallest_bytes=smallest,
            operation=where,
        )
