"""The compiler's callback between scheduling and code generation: read the module, plan, write, verify."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf

from memplan.compilation.limits import Headroom, Limits
from memplan.compilation.scheduled import Agree, Plans, ScheduledModule
from memplan.errors import PlanMismatchError
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.planning.legal import fault
from memplan.planning.packing import Packing, pack
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin
from memplan.planning.registry import Planner
from memplan.planning.schedule import Schedule
from memplan.verify.same_module import judge
from memplan.xla.host_copies import copy_slices
from memplan.xla.module import Module, read_module
from memplan.xla.rewrites.early_copies import copy_early
from memplan.xla.write import as_it_stands, write

# Of the bytes that a plan leaves for temporaries, so much may be live where collectives move: the first that the layout
# keeps. On an FSDP decoder at 80, 60, 45 and 30 % of its bytes it was 0.9, 0.95, 1 and 0.95.
_ROOMS = (1.0, 0.95, 0.9, 0.8)
# Of the bytes that the budget leaves for temporaries: so much less is for an order's second plan, if the first is slow.
# It leaves room for collectives beside kernels: an FSDP decoder of 8 layers on 2 x 4 A100s took 51, 52 and 55 ms at 78,
# 59 and 44 % of its bytes with the first, 47, 49 and 50 with the second, as with up to five times as much less.
_LESS = 0.03
# Of what an order takes without a budget: a plan that takes more is slow, and compared with a plan for another order. A
# decoder with FSDP and tensor parallelism at 45 % of its bytes took 156 ms in the order that feeds the links, 146 in
# XLA's.
_NEARLY = 1.03


@dataclass(frozen=True)
class PlannedModule:
    """A module with its plan."""

    plain: ScheduledModule  # as XLA scheduled it
    base: ScheduledModule  # what was planned: the same, or its rewrite (`ScheduledModule.rewrite`)
    plan: Plan | None = None  # what it was made into; None where it went through as it is
    schedule: Schedule = ()  # the plan, by the numbers of the base's problem
    written: ScheduledModule | None = None  # the module that was returned to XLA
    fits: bool = True  # by the prediction
    # predicted_bytes, predicted_host_bytes: device and host bytes
    predicted_bytes: int = 0
    predicted_host_bytes: int = 0
    # seconds from the module that was read to a plan that is carried out, however it was come by; 0 where the module
    # went through as it is
    planning_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """No plan within the budget takes less time."""
        return min(one.replay.step_s for one in (self.plain, self.base, self.result))

    @property
    def result(self) -> ScheduledModule:
        """The module that is compiled."""
        return self.written or self.plain


@dataclass
class Callback:
    """Called with the text of a scheduled module; `planned` tells afterwards what was made of it."""

    device: Device  # that the module is compiled for
    limits: Limits  # of the whole step; `headroom` is left free of them
    headroom: Headroom
    machine: Machine | None  # of which the device is one
    planner: Planner  # makes the plan; `follow`: one to carry out instead
    follow: Plan | None
    agree: Agree  # brings all processes of the step to one plan
    overlap_loop_copies: bool = False  # the module's own loops copy, and do so beside all of a trip
    program: str = ""  # digest of the step, where a plan is followed
    pins: tuple[Pin, ...] = ()  # of the step
    _planned: PlannedModule | None = field(default=None, init=False)

    @property
    def was_called(self) -> bool:
        return self._planned is not None

    @property
    def planned(self) -> PlannedModule:
        assert self._planned is not None, "the module was not compiled"
        return self._planned

    def __call__(self, text: str) -> str | None:
        with _without_collecting():
            scheduled = read_module(text)
            module = copy_slices(copy_early(scheduled) if self.overlap_loop_copies else scheduled, self.device)
            budget = self.limits.device_bytes - self.headroom.device_bytes
            ways = self._ways(ScheduledModule(module, self.device, self.machine, self.pins), budget)
            moves_pinned = bool(self.pins) and ways[0].problem.moves_pinned
            if self.follow is None and ways[0].device_bytes <= budget and not moves_pinned:
                self._planned, rewritten = PlannedModule(ways[0], ways[0], predicted_bytes=ways[0].device_bytes), None
            else:
                rewritten = self._rewrite(ways, budget)
            plain = self.planned.plain.module
            if plain is scheduled:
                return rewritten
            judge(scheduled, plain)
            return rewritten or as_it_stands(plain)

    def _ways(self, plain: ScheduledModule, budget: int) -> Sequence[ScheduledModule]:
        """The fastest order that fits without a plan; if none does, the orders to plan with, in turn.

        These are the one that feeds the links, which takes few bytes, XLA's, before the other if that is much slower,
        and the smallest. Of a plan that is followed, the one that it is for.
        """
        if self.machine is None:
            return (plain,)
        if self.follow:
            return (plain.overlap(*self.follow.overlapped) if self.follow.overlapped else plain,)
        # An FSDP decoder whose order takes 6 ms less than XLA's, of 57, takes 14 KiB more, of 8 GiB.
        most = max(budget, int(1.01 * plain.device_bytes))
        found = [plain, *(self._overlapped(plain, most, feeds_links) for feeds_links in (False, True))]
        if all(way.device_bytes > budget for way in found):
            # The same for each budget, as is what errors call smallest. If it fits, so may faster ones.
            smallest = plain.overlap(0, feeds_links=True)
            if smallest.device_bytes > budget:
                ways = [plain.overlap(most - plain.resident_bytes, feeds_links=True), plain, smallest]
                if ways[0].replay.step_s > _NEARLY * plain.replay.step_s:
                    ways[:2] = reversed(ways[:2])
                return [way.with_waits() for way in {id(way): way for way in ways}.values()]
            found += [smallest, self._overlapped(plain, budget, feeds_links=True)]
        return (min((way for way in found if way.device_bytes <= budget), key=lambda way: way.replay.step_s),)

    def _overlapped(self, one: ScheduledModule, budget: int, feeds_links: bool = False) -> ScheduledModule:
        """With its collectives beside more kernels, where that is faster and keeps the budget."""
        if self.machine is None:
            return one
        for share in _ROOMS:
            found = one.overlap(int(share * (budget - one.resident_bytes)), feeds_links)
            if found.device_bytes <= budget:
                return min(one, found, key=lambda way: (way.replay.step_s, way.device_bytes))
        return one

    def _rewrite(self, ways: Sequence[ScheduledModule], budget: int) -> str:
        started = time.perf_counter()
        follow = self._followed(self.follow, ways, budget) if self.follow else None
        made = self._carried_out(follow, budget) if follow else self._planned_anew(ways, budget)
        planning_s = time.perf_counter() - started
        found, written = made.found, made.module
        text = as_it_stands(written.module)
        judge(found.plain.module, written.module)
        self._planned = PlannedModule(
            found.plain,
            found.base,
            found.plan,
            found.schedule,
            written,
            fits=made.device_bytes <= budget,
            predicted_bytes=made.device_bytes,
            predicted_host_bytes=found.packing.host_nbytes,
            planning_s=planning_s,
        )
        return text

    def _carried_out(self, found: _LaidOut, budget: int) -> _CarriedOut:
        """The module of a plan, its collectives beside more kernels where that keeps the budget, and the plan's own."""
        text = write(found.base.module, found.base.problem, found.schedule)
        written = ScheduledModule(read_module(text, found.base.module), self.device, self.machine)
        beside = self._overlapped(written, min(budget, found.plan.budget_bytes or budget))
        laid_out = found.plain.resident_bytes + found.packing.nbytes
        return _CarriedOut(found, beside, laid_out if beside is written else beside.device_bytes)

    def _followed(self, plan: Plan, ways: Sequence[ScheduledModule], budget: int) -> _LaidOut | None:
        """The plan to follow; None where XLA chose other kernels for the same program, so that it no longer fits.

        XLA times its kernels when it compiles, and may choose others each time that a job starts.

        Raises:
          PlanMismatchError: the plan is for another program, device or release of jax.
        """
        plain, module = ways[0], ways[0].module
        if plan.fingerprint == module.fingerprint:
            return _laid_out(plan, plain, is_saved=True)
        if not plan.program or (plan.program, plan.device) != (self.program, self.device.name):
            plan.check(module.fingerprint)
        found = None
        if plan.structure == module.structure:
            with suppress(PlanMismatchError):  # rewritten for a room, it has other kernels
                found = _laid_out(replace(plan, fingerprint=module.fingerprint), plain, is_saved=True)
        if found is not None and plain.resident_bytes + found.packing.nbytes > budget:
            found = None
        warnings.warn(
            f"XLA compiled this step to different kernels than when its plan was made ({_changed(plan, module)}); "
            f"{'the plan is used anyway' if found else 'the step is planned again'}.",
            stacklevel=2,
        )
        return found

    def _planned_anew(self, ways: Sequence[ScheduledModule], budget: int) -> _CarriedOut:
        """The best plan for the first order; for the next, too, as long as none fits, or if that may be faster."""
        tried = list[_CarriedOut]()
        others_s = min((way.replay.step_s for way in ways[1:]), default=inf)
        for number, way in enumerate(ways):
            tried += self._plans(way, budget)
            best = _best(tried, budget)
            if best.device_bytes <= budget and (number or best.module.replay.step_s <= _NEARLY * others_s):
                break
        return _best(tried, budget)

    def _plans(self, plain: ScheduledModule, budget: int) -> Iterator[_CarriedOut]:
        """Plans for one order, carried out; the second, for fewer bytes, if the first is slow."""
        for limit in (budget, budget - int(_LESS * (budget - plain.resident_bytes))):
            plans = Plans(plain, limit, self.limits.host_bytes - self.headroom.host_bytes, self.planner)
            plan = replace(plans.agree(self.agree), budget_bytes=budget)
            made = self._carried_out(_laid_out(plan, plain), budget)
            yield made
            fast_s = _NEARLY * plain.replay.step_s
            if self.machine is None or made.device_bytes > budget or made.module.replay.step_s <= fast_s:
                return


@dataclass(frozen=True)
class _LaidOut:
    """A plan for a module: what is rewritten for it, its schedule, and where that has its buffers."""

    plain: ScheduledModule
    plan: Plan
    base: ScheduledModule
    schedule: Schedule
    packing: Packing


@dataclass(frozen=True)
class _CarriedOut:
    """A plan, the module that is compiled, whose collectives are beside more kernels, and its bytes."""

    found: _LaidOut
    module: ScheduledModule
    device_bytes: int


def _best(tried: Sequence[_CarriedOut], budget: int) -> _CarriedOut:
    """The fastest that fits, or else the smallest."""
    fitting = [one for one in tried if one.device_bytes <= budget]
    return min(fitting or tried, key=lambda one: one.module.replay.step_s if fitting else one.device_bytes)


def _laid_out(plan: Plan, plain: ScheduledModule, is_saved: bool = False) -> _LaidOut:
    """Raises PlanMismatchError where the plan is for another module, or was edited and computes something else."""
    plan.check(plain.module.fingerprint)
    base = plain.rewrite(plan.rewritten_for_nbytes, plan.extra_outputs)
    schedule = plan.schedule(base.problem)
    if is_saved and (told := fault(base.problem, schedule)):
        raise PlanMismatchError(f"the plan does not compute this program: {told}. It was edited; plan again.")
    return _LaidOut(plain, plan, base, schedule, pack(base.problem, schedule))


def _changed(plan: Plan, module: Module) -> str:
    """The first kernel that another one was chosen for, and how many more."""
    before, now = dict(plan.kernels), module.chosen_kernels
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return "its fusions differ"
    was, is_now = (kernels.get(names[0], "none") for kernels in (before, now))
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}: {was}, now {is_now}{more}"


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
