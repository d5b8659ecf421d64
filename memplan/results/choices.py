"""What each choice about a buffer costs in a plan, beside the one that the plan makes: in bytes, seconds and waits.

All other decisions stay. Kernels, copies and what may run again are the planner's own figures; a copy that the plan
does not have is placed as the planner places one: out as early, and back as late, as the links are free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memplan.planning.liveness import Liveness
from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem, Where
from memplan.planning.schedule import CopySeconds, Kind, Schedule, clock
from memplan.planning.search.effort import DEFAULT
from memplan.planning.search.tape import record
from memplan.report.decisions import Choice, Choices

_ENTRY = -1  # the level of a tape's slots that are in no loop and no branch
_LONGEST = max(longest for longest, _ in DEFAULT.escalation)  # kernels that the planner runs again for one value

Spans = Sequence[tuple[float, float]]


class Use(NamedTuple):
    """A run that makes or reads a value."""

    time: int  # of the schedule's actions
    slot: int  # of the tape: the run's own, or the one that it is repeated for


class Prices:
    """What each choice about a buffer costs."""

    def __init__(self, problem: Problem, schedule: Schedule, copy_s: CopySeconds | None, host_room_nbytes: int) -> None:
        """Of a plan.

        Args:
          problem: with seconds.
          copy_s: seconds of a copy, one way; None without a link.
          host_room_nbytes: that the plan leaves of the host's budget.
        """
        self._problem, self._schedule = problem, schedule
        self._copy_s, self._host_room_nbytes = copy_s, host_room_nbytes
        self._clock = clock(problem, schedule, copy_s)
        self._live = live_nbytes(problem, schedule)
        order = dict.fromkeys(action.number for action in schedule if action.kind is Kind.RUN)
        self._tape = record(problem, list(order))
        self._value = {one.buffer: number for number, one in enumerate(self._tape.values)}
        self._uses = self._find_uses()
        self._there: dict[int, list[tuple[int, int]]] = defaultdict(list)  # buffer -> actions, both included
        for version in Liveness(problem, schedule).versions:
            self._there[version.buffer].append((version.start, version.end))
        self._waits_s: dict[int, float] = defaultdict(float)  # buffer -> seconds that kernels wait for its copies
        for action, (start, end) in zip(schedule, pairwise((0.0, *self._clock.ends)), strict=True):
            if action.kind in (Kind.OFFLOADED, Kind.PREFETCHED):
                self._waits_s[action.number] += end - start

    def of(self, buffer: int, choice: Choice, taken_s: float) -> Choices | None:
        """The costs for a buffer; None for one that is alive for the planner throughout, such as an output.

        Args:
          taken_s: what the plan's own choice costs.
        """
        value = self._value.get(buffer)
        if value is None or len(self._uses[value]) < 2:
            return None
        gap = max(pairwise(self._uses[value]), key=lambda gap: self._start(gap[1]) - self._end(gap[0]))
        recompute_s, no_recompute = (taken_s, "") if choice == "recompute" else self._recompute(value, gap[1])
        if choice == "offload":
            host_s, wait_s, no_host = taken_s, self._waits_s[buffer], ""
        else:
            host_s, wait_s, no_host = self._offload(value, gap[1])
        return Choices(self._keep(buffer), recompute_s, host_s, wait_s, no_recompute, no_host)

    def _find_uses(self) -> Mapping[int, Sequence[Use]]:
        """By value: its first run, and every run that reads it, those that the plan repeats included."""
        tape, found = self._tape, defaultdict[int, list[Use]](list)
        slots: dict[int, int] = {}
        for time, action in enumerate(self._schedule):
            if action.kind is not Kind.RUN:
                continue
            if (again := slots.get(action.number)) is not None:
                reads = tape.operations[again].reads
            else:
                slots[action.number] = len(slots)
                reads = tape.slots[slots[action.number]].reads
            use = Use(time, min(len(slots) - (again is None), tape.count - 1))
            for value in (*reads, *(tape.slots[use.slot].writes if again is None else ())):
                found[value].append(use)
        return found

    def _keep(self, buffer: int) -> int:
        """Bytes by which the device's peak rises if the buffer is there between the times at which it is."""
        absent = [self._live[end + 1 : start] for (_, end), (start, _) in pairwise(sorted(self._there[buffer]))]
        higher = [int(part.max()) + self._problem.buffers[buffer].nbytes for part in absent if len(part)]
        return max(0, max(higher, default=0) - int(self._live.max()))

    def _recompute(self, value: int, use: Use) -> tuple[float | None, str]:
        """Seconds of the kernels that make a value again for a use, or why none can."""
        tape = self._tape
        if self._problem.is_pinned(tape.values[value].buffer, Where.DEVICE, Where.HOST):
            return None, "pinned"
        chain: dict[int, float] = {}
        asked = [value]
        while asked:
            made = tape.values[asked.pop()].maker
            if made in chain:
                continue
            seconds = tape.operations[made].seconds
            if seconds is None:
                return None, "it runs once" if not chain else "what it reads is made once"
            if not tape.may_recompute(made, use.slot):
                return None, "what it reads is overwritten"
            if len(chain) == _LONGEST:
                return None, f"it takes more than {_LONGEST} kernels"
            chain[made] = seconds
            asked += [read for read in tape.operations[made].reads if not self._is_there(read, use.time)]
        return sum(chain.values()), ""

    def _is_there(self, value: int, time: int) -> bool:
        return any(start < time <= end for start, end in self._there[self._tape.values[value].buffer])

    def _offload(self, value: int, after: Use) -> tuple[float | None, float | None, str]:
        """Seconds of the copies that bring a value back for a use, those that kernels wait, and why none can be."""
        one, tape = self._tape.values[value], self._tape
        if self._copy_s is None:
            return None, None, "no link"
        if not one.may_offload:
            return None, None, "pinned"
        if one.nbytes > self._host_room_nbytes:
            return None, None, "the host's budget is full"
        level = tape.operations[one.maker].block
        if tape.slots[after.slot].block != level or one.is_read_by_pair(after.slot):
            return None, None, "another computation reads it"
        each_s = self._copy_s(one.nbytes) * one.times
        if level != _ENTRY:
            return 2 * each_s, None, ""
        return 2 * each_s, self._wait(self._uses[value][0], after, each_s), ""

    def _wait(self, made: Use, after: Use, each_s: float) -> float:
        """Seconds that kernels wait for a copy out after one use and a copy back for another.

        A copy begins and ends where a kernel does, but for those that wait for their turn on the link.
        """
        back, start = self._clock.busy[Kind.PREFETCH], self._start(after)
        moments = self._clock.ends[made.time : after.time]
        out_end = _first_room(self._clock.busy[Kind.OFFLOAD], self._end(made), each_s) + each_s
        latest = _last_room(back, start, each_s)
        gone = bisect_left(moments, out_end)  # the first moment with the copy on the host
        if gone < len(moments) and moments[gone] <= latest:
            return 0.0
        # Kernels wait for the copy out at the last moment before its end, then for the copy back, or for that alone.
        moment = moments[gone - 1]
        late_s = _first_room(back, out_end, each_s) + each_s - out_end - (start - moment)
        waits = [2 * each_s, out_end - moment + max(0.0, late_s)]
        if gone < len(moments):
            waits.append(_first_room(back, moments[gone], each_s) + each_s - start)
        return max(0.0, min(waits))

    def _end(self, use: Use) -> float:
        return self._clock.ends[use.time]

    def _start(self, use: Use) -> float:
        return self._clock.ends[use.time - 1] if use.time else 0.0


def _first_room(busy: Spans, since: float, seconds: float) -> float:
    """The first moment from which a link is free for so long."""
    for start, end in busy:
        if end <= since:
            continue
        if start - since >= seconds:
            break
        since = max(since, end)
    return since


def _last_room(busy: Spans, until: float, seconds: float) -> float:
    """The last moment from which a link is free for so long, and done."""
    for start, end in reversed(busy):
        if start >= until:
            continue
        if until - end >= seconds:
            break
        until = min(until, start)
    return until - seconds
