"""XLA's callback between scheduling and code generation: read the module, plan, write, verify."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf

from memplan.compilation.limits import Headroom, Limits, Rank, rank
from memplan.compilation.scheduled import Agree, Plans, ScheduledModule
from memplan.errors import PlanMismatchError
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.planning.legal import fault
from memplan.planning.packing import Packing, pack
from memplan.planning.plan import Feeding, Plan
from memplan.planning.problem import Pin
from memplan.planning.registry import Planner
from memplan.planning.schedule import Schedule
from memplan.verify.same_module import judge
from memplan.xla.hook import Stopped
from memplan.xla.host_copies import copy_slices
from memplan.xla.module import Module
from memplan.xla.rewrites.early_copies import copy_early
from memplan.xla.write import write

# Order kernels for these shares of the free memory, and keep the first order whose packing fits.
# On an FSDP decoder at 80, 60, 45 and 30 % of its bytes the share was 0.9, 0.95, 1 and 0.95.
_OVERLAP_SHARES = (1.0, 0.95, 0.9, 0.8)
# Neither way to feed the links is always the faster: ResNet-50 over 8 x 8 H100s, its sums in
# bfloat16, took 22.0 ms critical first and 23.1 in turn, over 2 x 4 A100s, its sums in float32,
# 31.7 and 30.9.
_FEEDINGS: Sequence[Feeding] = ("critical first", "in turn")
# If an order's first plan is slow, plan again with 3 % less temporary memory. The margin is for
# collectives that overlap kernels: an FSDP decoder of 8 layers on 2 x 4 A100s took 51, 52 and 55
# ms at 78, 59 and 44 % of its bytes by the first plan, 47, 49 and 50 ms by the second. Margins of
# up to 15 % gave the same.
_SECOND_PLAN_MARGIN = 0.03
# A plan is slow above 1.03 times its order's unplanned time; then another order is planned, too. A
# decoder with FSDP and tensor parallelism at 45 % of its bytes took 156 ms in the link-feeding
# order, 146 in XLA's.
_SLOW_RATIO = 1.03
# Look for orders within the budget, or within 1.01 times the bytes of XLA's order if that is more.
# For an FSDP decoder, the order that takes 6 ms less than XLA's, of 57, needs 14 KiB more, of 8
# GiB.
_ORDER_GROWTH = 1.01


@dataclass(frozen=True)
class PlannedModule:
    """The result of a callback: the module as XLA scheduled it, and as memplan returned it."""

    plain: ScheduledModule  # as XLA scheduled it
    base: ScheduledModule  # the module that the plan is for: `plain`, or its rewrite
    plan: Plan | None = None  # None if the module is unchanged
    schedule: Schedule = ()  # the plan, by the numbers of the base's problem
    written: ScheduledModule | None = None  # the module that was returned to XLA
    fits: bool = True  # the predicted bytes are within the budget
    predicted_bytes: int = 0  # on the device
    predicted_host_bytes: int = 0
    planning_s: float = 0.0  # planning time in seconds; 0 if the module is unchanged

    @property
    def bound_s(self) -> float:
        """A lower bound of the seconds of any plan within the budget."""
        return min(module.replay.step_s for module in (self.plain, self.base, self.result))

    @property
    def result(self) -> ScheduledModule:
        """The module that XLA compiles."""
        return self.written or self.plain


@dataclass
class Callback:
    """XLA calls it with a scheduled module; `planned` is its result."""

    device: Device  # the device that the module is compiled for
    limits: Limits  # of the whole step
    headroom: Headroom  # bytes below the limits that the plan leaves unused
    machine: Machine | None  # the machine of the device
    planner: Planner  # makes the plan if `follow` is None
    follow: Plan | None  # a saved plan to follow
    agree: Agree  # makes all processes of the step use one plan
    overlap_loop_copies: bool = False  # start copies in the module's own loops as early as possible
    program: str = ""  # digest of the step, where a plan is followed
    pins: tuple[Pin, ...] = ()  # of the step
    # whether XLA compiles the planned module; else the compilation ends there
    commits: Callable[[PlannedModule], bool] = lambda planned: True
    _read: ScheduledModule | None = field(default=None, init=False)
    _planned: PlannedModule | None = field(default=None, init=False)

    @property
    def was_called(self) -> bool:
        return self._planned is not None

    @property
    def planned(self) -> PlannedModule:
        assert self._planned is not None, "the module was not compiled"
        return self._planned

    @property
    def plain(self) -> ScheduledModule:
        """The module to plan, as XLA scheduled it."""
        assert self._read is not None, "the module was not compiled"
        return self._read

    def __call__(self, scheduled: Module) -> Module | None:
        planned = self.plan(self.read(scheduled))
        if not self.commits(planned):
            raise Stopped
        return self._judged(scheduled, planned)

    def read(self, scheduled: Module) -> ScheduledModule:
        """The module to plan, which is the same for all limits."""
        with _without_cyclic_gc():
            early = copy_early(scheduled) if self.overlap_loop_copies else scheduled
            module = copy_slices(early, self.device)
            self._read = ScheduledModule(module, self.device, self.machine, self.pins)
            return self._read

    def plan(self, plain: ScheduledModule) -> PlannedModule:
        """The module planned, unless it fits as it is."""
        with _without_cyclic_gc():
            budget = self.limits.device_bytes - self.headroom.device_bytes
            orders = self._kernel_orders(plain, budget)
            first = orders[0]
            moves_pinned = bool(self.pins) and first.problem.moves_pinned
            if self.follow is None and first.device_bytes <= budget and not moves_pinned:
                self._planned = PlannedModule(first, first, predicted_bytes=first.device_bytes)
            else:
                self._planned = self._plan(orders, budget)
            return self._planned

    def _judged(self, scheduled: Module, planned: PlannedModule) -> Module | None:
        """The module for XLA to compile, judged; None if it is the one that XLA scheduled."""
        plain, result = planned.plain.module, planned.result.module
        if result is not plain:
            judge(plain, result)
        if plain is not scheduled:
            judge(scheduled, plain)
        return None if result is scheduled else result

    def _kernel_orders(self, plain: ScheduledModule, budget: int) -> Sequence[ScheduledModule]:
        """The fastest order that fits unplanned, else the orders to plan (`_orders_to_plan`).

        If a saved plan is followed, the order of that plan.
        """
        if self.machine is None:
            return (plain,)
        if self.follow:
            return (plain.overlap(*self.follow.overlapped) if self.follow.overlapped else plain,)
        order_budget = max(budget, int(_ORDER_GROWTH * plain.device_bytes))
        overlapping = self._overlap_collectives(plain, order_budget)
        orders = [plain, overlapping, *self._feeding(plain, order_budget)]
        if all(order.device_bytes > budget for order in orders):
            # It is the same for every budget, so that all errors name the same smallest budget.
            smallest = plain.overlap(0, "critical first")
            if smallest.device_bytes > budget:
                return self._orders_to_plan(plain, smallest, order_budget)
            orders += [smallest, *self._feeding(plain, budget)]
        return (min(orders, key=lambda order: _rank(order, order.device_bytes, budget)),)

    def _orders_to_plan(
        self, plain: ScheduledModule, smallest: ScheduledModule, order_budget: int
    ) -> Sequence[ScheduledModule]:
        """The orders to plan, each once: link-feeding, XLA's, smallest.

        XLA's comes first if the link-feeding order is slow.
        """
        limit_nbytes = order_budget - plain.resident_bytes
        feeding = min(
            (plain.overlap(limit_nbytes, feeding) for feeding in _FEEDINGS),
            key=lambda order: order.replay.step_s,
        )
        is_slow = feeding.replay.step_s > _SLOW_RATIO * plain.replay.step_s
        orders = [plain, feeding, smallest] if is_slow else [feeding, plain, smallest]
        return [order.with_waits() for order in {id(order): order for order in orders}.values()]

    def _feeding(self, plain: ScheduledModule, budget: int) -> Iterator[ScheduledModule]:
        """The orders in which kernels feed the links."""
        for feeding in _FEEDINGS:
            yield self._overlap_collectives(plain, budget, feeding)

    def _overlap_collectives(
        self, scheduled: ScheduledModule, budget: int, feeding: Feeding = ""
    ) -> ScheduledModule:
        """Overlap collectives with more kernels if that is faster and within the budget."""
        if self.machine is None:
            return scheduled
        for share in _OVERLAP_SHARES:
            limit_nbytes = int(share * (budget - scheduled.resident_bytes))
            overlapped = scheduled.overlap(limit_nbytes, feeding)
            if overlapped.device_bytes <= budget:
                return min(scheduled, overlapped, key=_seconds_then_bytes)
        return scheduled

    def _plan(self, orders: Sequence[ScheduledModule], budget: int) -> PlannedModule:
        """The module planned, or by the saved plan."""
        started = time.perf_counter()
        saved = self._pack_saved(self.follow, orders[0], budget) if self.follow else None
        candidate = self._write(saved, budget) if saved else self._plan_orders(orders, budget)
        packed = candidate.packed
        return PlannedModule(
            packed.plain,
            packed.base,
            packed.plan,
            packed.schedule,
            candidate.module,
            fits=candidate.device_bytes <= budget,
            predicted_bytes=candidate.device_bytes,
            predicted_host_bytes=packed.packing.host_nbytes,
            planning_s=time.perf_counter() - started,
        )

    def _write(self, packed: _PackedPlan, budget: int) -> _Candidate:
        """Write the plan's module, then overlap its collectives if it still fits."""
        base = packed.base
        module = write(base.module, base.problem, packed.schedule)
        written = ScheduledModule(module, self.device, self.machine)
        overlap_budget = min(budget, packed.plan.budget_bytes or budget)
        overlapped = self._overlap_collectives(written, overlap_budget)
        if overlapped is written:
            return _Candidate(packed, written, packed.device_bytes)
        return _Candidate(packed, overlapped, overlapped.device_bytes)

    def _pack_saved(self, plan: Plan, plain: ScheduledModule, budget: int) -> _PackedPlan | None:
        """The saved plan; None if it no longer fits because XLA chose other kernels.

        XLA times its kernels when it compiles, and may choose others each time that a job starts.

        Raises:
          PlanMismatchError: the plan is for another program, device or release of jax.
        """
        module = plain.module
        if plan.fingerprint == module.fingerprint:
            return _pack(plan, plain, is_saved=True)
        if not plan.program or (plan.program, plan.device) != (self.program, self.device.name):
            plan.check(module.fingerprint)
        packed = None
        if plan.structure == module.structure:
            with suppress(PlanMismatchError):  # the rewrite may have other kernels now
                packed = _pack(replace(plan, fingerprint=module.fingerprint), plain, is_saved=True)
        if packed is not None and packed.device_bytes > budget:
            packed = None
        warnings.warn(
            "XLA compiled this step to different kernels than when its plan was made "
            f"({_changed(plan, module)}); "
            f"{'the plan is used anyway' if packed else 'the step is planned again'}.",
            stacklevel=2,
        )
        return packed

    def _plan_orders(self, orders: Sequence[ScheduledModule], budget: int) -> _Candidate:
        """The best candidate of all orders, planned until one fits and no other may be faster.

        A later order is planned only if no plan fits, or if the first order's plan is slow.
        """
        later_s = min((order.replay.step_s for order in orders[1:]), default=inf)
        candidates = list[_Candidate]()
        for number, order in enumerate(orders):
            candidates += self._plan_order(order, budget)
            best = _best(candidates, budget)
            is_fast = best.module.replay.step_s <= _SLOW_RATIO * later_s
            if best.device_bytes <= budget and (number or is_fast):
                break
        return _best(candidates, budget)

    def _plan_order(self, plain: ScheduledModule, budget: int) -> Iterator[_Candidate]:
        """A candidate for one order; if it is slow, a second one with less temporary memory."""
        host_bytes = self.limits.host_bytes - self.headroom.host_bytes
        margin = int(_SECOND_PLAN_MARGIN * (budget - plain.resident_bytes))
        for limit in (budget, budget - margin):
            plans = Plans(plain, limit, host_bytes, self.planner)
            plan = replace(plans.agree(self.agree), budget_bytes=budget)
            candidate = self._write(_pack(plan, plain), budget)
            yield candidate
            is_fast = candidate.module.replay.step_s <= _SLOW_RATIO * plain.replay.step_s
            if self.machine is None or candidate.device_bytes > budget or is_fast:
                return


@dataclass(frozen=True)
class _PackedPlan:
    """A plan with its module, its schedule, and the offsets of that schedule's buffers."""

    plain: ScheduledModule  # one order of the module's kernels
    plan: Plan
    base: ScheduledModule  # `plain`, rewritten for the plan
    schedule: Schedule  # by the numbers of the base's problem
    packing: Packing

    @property
    def device_bytes(self) -> int:
        return self.plain.resident_bytes + self.packing.nbytes


@dataclass(frozen=True)
class _Candidate:
    """A packed plan, written as a module for XLA to compile."""

    packed: _PackedPlan
    module: ScheduledModule  # the written module, its collectives overlapped with more kernels
    device_bytes: int  # predicted


def _best(candidates: Sequence[_Candidate], budget: int) -> _Candidate:
    return min(
        candidates, key=lambda candidate: _rank(candidate.module, candidate.device_bytes, budget)
    )


def _seconds_then_bytes(module: ScheduledModule) -> tuple[float, int]:
    return module.replay.step_s, module.device_bytes


def _rank(module: ScheduledModule, device_bytes: int, budget: int) -> Rank:
    replay = module.replay
    return rank(device_bytes <= budget, replay.step_s, device_bytes, replay.actions)


def _pack(plan: Plan, plain: ScheduledModule, is_saved: bool = False) -> _PackedPlan:
    """Rewrite the module for a plan, and pack the plan's buffers.

    Raises:
      PlanMismatchError: the plan is for another module, or was edited and computes something else.
    """
    plan.check(plain.module.fingerprint)
    base = plain.rewrite(plan.rewritten_for_nbytes, plan.extra_outputs)
    schedule = plan.schedule(base.problem)
    if is_saved and (reason := fault(base.problem, schedule)):
        raise PlanMismatchError(
            f"the plan does not compute this program: {reason}. It was edited; plan again."
        )
    return _PackedPlan(plain, plan, base, schedule, pack(base.problem, schedule))


def _changed(plan: Plan, module: Module) -> str:
    """The first kernel that XLA chose differently than for the plan, and the number of others."""
    planned, current = dict(plan.kernels), module.chosen_kernels
    names = [name for name in {**planned, **current} if planned.get(name) != current.get(name)]
    if not names:
        return "its fusions differ"
    was, is_now = (kernels.get(names[0], "none") for kernels in (planned, current))
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}: {was}, now {is_now}{more}"


@contextmanager
def _without_cyclic_gc() -> Iterator[None]:
    """Disable the cyclic GC: modules are acyclic, and collections take a sixth of planning."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
