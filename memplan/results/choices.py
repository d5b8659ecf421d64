"""Costs of the alternatives to each decision of a plan, in bytes, seconds and waits.

All other decisions stay. The figures of kernels and copies, and whether a kernel may run again, are
the planner's own. A copy that the plan does not have is placed as the planner would: out as early,
and back as late, as the links are free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memplan.planning.clock import first_gap, last_gap
from memplan.planning.liveness import Liveness
from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem, Where
from memplan.planning.schedule import CopySeconds, Kind, Schedule, simulate
from memplan.planning.search.effort import DEFAULT
from memplan.planning.search.tape import record
from memplan.report.decisions import Choice, Choices

_ENTRY = -1  # the level of a tape's slots outside of loops and branches
# The planner recomputes a value by at most so many kernels.
_MAX_CHAIN = max(longest for longest, _ in DEFAULT.escalation)


class Use(NamedTuple):
    """A run of a kernel that writes or reads a value."""

    time: int  # index of the schedule's action
    slot: int  # of the tape: the run's own, or that of the kernel which a repeated run serves


class Prices:
    """Costs of the choices about each buffer of a plan."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        copy_s: CopySeconds | None,
        host_free_nbytes: int,
    ) -> None:
        """Set up the tape and clock of a plan.

        Args:
          problem: its kernels have seconds.
          copy_s: seconds of a copy, one way; None without a link.
          host_free_nbytes: the part of the host's budget that the plan does not use.
        """
        self._problem = problem
        self._schedule = schedule
        self._copy_s = copy_s
        self._host_free_nbytes = host_free_nbytes
        self._ends, self._clock = simulate(problem, schedule, copy_s)
        self._live = live_nbytes(problem, schedule)
        order = dict.fromkeys(action.number for action in schedule if action.kind is Kind.RUN)
        self._tape = record(problem, list(order))
        self._value = {value.buffer: number for number, value in enumerate(self._tape.values)}
        self._uses = self._find_uses()
        # Buffer -> first and last action of each stay on the device.
        self._stays: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for version in Liveness(problem, schedule).versions:
            self._stays[version.buffer].append((version.start, version.end))
        # Buffer -> seconds that its copies stall kernels.
        self._waits_s: dict[int, float] = defaultdict(float)
        for action, (start, end) in zip(schedule, pairwise((0.0, *self._ends)), strict=True):
            if action.kind in (Kind.OFFLOADED, Kind.PREFETCHED):
                self._waits_s[action.number] += end - start

    def of(self, buffer: int, choice: Choice, choice_s: float) -> Choices | None:
        """The costs for a buffer; None for one that is always alive, such as an output.

        Args:
          choice: the plan's own.
          choice_s: its cost.
        """
        value = self._value.get(buffer)
        if value is None or len(self._uses[value]) < 2:
            return None
        gap = max(
            pairwise(self._uses[value]), key=lambda gap: self._start(gap[1]) - self._end(gap[0])
        )
        if choice == "recompute":
            recompute_s, no_recompute = choice_s, ""
        else:
            recompute_s, no_recompute = self._recompute(value, gap[1])
        if choice == "offload":
            host_s, host_wait_s, no_host = choice_s, self._waits_s[buffer], ""
        else:
            host_s, host_wait_s, no_host = self._offload(value, gap[1])
        return Choices(
            keep_bytes=self._keep(buffer),
            recompute_s=recompute_s,
            host_s=host_s,
            host_wait_s=host_wait_s,
            no_recompute=no_recompute,
            no_host=no_host,
        )

    def _find_uses(self) -> Mapping[int, Sequence[Use]]:
        """By value: its first run, and every run that reads it, repeated ones included."""
        tape = self._tape
        uses = defaultdict[int, list[Use]](list)
        slots: dict[int, int] = {}  # kernel -> the slot of its first run
        for time, action in enumerate(self._schedule):
            if action.kind is not Kind.RUN:
                continue
            if action.number in slots:
                slot = min(len(slots), tape.count - 1)
                values = tape.operations[slots[action.number]].reads
            else:
                slot = len(slots)
                slots[action.number] = slot
                values = (*tape.slots[slot].reads, *tape.slots[slot].writes)
            for value in values:
                uses[value].append(Use(time, slot))
        return uses

    def _keep(self, buffer: int) -> int:
        """Bytes by which the device's peak rises if the buffer also stays between its stays."""
        nbytes = self._problem.buffers[buffer].nbytes
        stays = sorted(self._stays[buffer])
        gaps = [self._live[end + 1 : start] for (_, end), (start, _) in pairwise(stays)]
        peaks = [int(gap.max()) + nbytes for gap in gaps if len(gap)]
        return max(0, max(peaks, default=0) - int(self._live.max()))

    def _recompute(self, value: int, use: Use) -> tuple[float | None, str]:
        """Seconds of the kernels that recompute a value for a use, or why they cannot."""
        tape = self._tape
        if self._problem.is_pinned(tape.values[value].buffer, Where.DEVICE, Where.HOST):
            return None, "pinned"
        chain: dict[int, float] = {}
        missing = [value]
        while missing:
            maker = tape.values[missing.pop()].maker
            if maker in chain:
                continue
            seconds = tape.operations[maker].seconds
            if seconds is None:
                return None, "it runs once" if not chain else "what it reads is made once"
            if not tape.may_recompute(maker, use.slot):
                return None, "what it reads is overwritten"
            if len(chain) == _MAX_CHAIN:
                return None, f"it takes more than {_MAX_CHAIN} kernels"
            chain[maker] = seconds
            reads = tape.operations[maker].reads
            missing += [read for read in reads if not self._is_alive(read, use.time)]
        return sum(chain.values()), ""

    def _is_alive(self, value: int, time: int) -> bool:
        stays = self._stays[self._tape.values[value].buffer]
        return any(start < time <= end for start, end in stays)

    def _offload(self, value: int, after: Use) -> tuple[float | None, float | None, str]:
        """Seconds of a value's copies before a use, the part of them that stalls, or why not."""
        tape = self._tape
        evicted = tape.values[value]
        if self._copy_s is None:
            return None, None, "no link"
        if not evicted.may_offload:
            return None, None, "pinned"
        if evicted.nbytes > self._host_free_nbytes:
            return None, None, "the host's budget is full"
        level = tape.operations[evicted.maker].block
        if tape.slots[after.slot].block != level or evicted.is_read_by_pair(after.slot):
            return None, None, "another computation reads it"
        each_s = self._copy_s(evicted.nbytes) * evicted.times
        if level != _ENTRY:
            return 2 * each_s, None, ""
        return 2 * each_s, self._wait(self._uses[value][0], after, each_s), ""

    def _wait(self, first: Use, after: Use, each_s: float) -> float:
        """Seconds that kernels stall for a copy out after one use and a copy back for another.

        A copy starts and ends at the end of a kernel, unless it queues for the link.
        """
        to_device = self._clock.busy[Kind.PREFETCH]
        start = self._start(after)
        ends = self._ends[first.time : after.time]
        out_end = first_gap(self._clock.busy[Kind.OFFLOAD], self._end(first), each_s) + each_s
        latest = last_gap(to_device, start, each_s)
        index = bisect_left(ends, out_end)  # of the first end after the copy out
        if index < len(ends) and ends[index] <= latest:
            return 0.0
        # Kernels stall for the copy out at the last end before it, and maybe for the copy back.
        last_end = ends[index - 1]
        late_s = first_gap(to_device, out_end, each_s) + each_s - out_end - (start - last_end)
        waits = [2 * each_s, out_end - last_end + max(0.0, late_s)]
        if index < len(ends):
            waits.append(first_gap(to_device, ends[index], each_s) + each_s - start)
        return max(0.0, min(waits))

    def _end(self, use: Use) -> float:
        return self._ends[use.time]

    def _start(self, use: Use) -> float:
        return self._ends[use.time - 1] if use.time else 0.0
