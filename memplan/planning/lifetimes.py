"""The simulator's figures taken apart: what is in memory at any time, value by value and kernel by kernel.

Nothing here is on a planner's way: it is for whoever wants to see what a plan does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.planning.segment import SegmentModel, Turn
from memplan.planning.simulate import Moment, Simulator, Stretch, Timeline, base_nbytes, host_changes, stretches

_NOTICEABLE = 1e-9  # of a segment's end: less is rounding and no wait


@dataclass(frozen=True, slots=True)
class Instant:
    """What the compute stream does, and the memory in use meanwhile.

    Attributes:
      segment: of the plan.
      op: that the kernel stands for; -1 where nothing is computed.
      again: the operation has run before.
      start_s, end_s: on the compute stream. The next instant starts where this one ends.
      device_nbytes: device bytes: `base_nbytes`, the values that are there, and
      extra_nbytes: those of no value, such as scratch memory.
      host_nbytes: host bytes at their peak in the segment.
    """

    segment: int
    op: int
    again: bool
    start_s: float
    end_s: float
    device_nbytes: int
    extra_nbytes: int
    host_nbytes: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value is in memory during the instants `[first, last)`."""

    value: int
    on_host: bool
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """A plan replayed kernel by kernel.

    Attributes:
      base_nbytes: of arguments and outputs, which are there from beginning to end.
      timeline: of the same plan; its peak is that of the instants.
    """

    base_nbytes: int
    instants: tuple[Instant, ...]
    lifetimes: tuple[Lifetime, ...]
    timeline: Timeline


def lifetimes(simulator: Simulator, plan: Plan) -> Lifetimes:
    """What `simulator.run(plan)` counts, value by value."""
    timeline = simulator.run(plan)
    replay = _Replay(simulator, base_nbytes(simulator.graph))
    for number, (stretch, moment) in enumerate(zip(stretches(plan, simulator.graph), timeline.moments, strict=True)):
        replay.segment(number, stretch, moment)
    replay.close()
    return Lifetimes(
        base_nbytes(simulator.graph), tuple(replay.instants), tuple(sorted(replay.found, key=_order)), timeline
    )


def _order(lifetime: Lifetime) -> tuple[int, int, int]:
    return lifetime.first, lifetime.last, lifetime.value


@dataclass
class _Replay:
    simulator: Simulator
    live: int
    instants: list[Instant] = field(default_factory=list)
    found: list[Lifetime] = field(default_factory=list)
    _on_device: dict[int, list[int]] = field(default_factory=dict)  # value -> the instants its copies came at
    _on_host: dict[int, int] = field(default_factory=dict)
    _to_come: set[int] = field(default_factory=set)
    _host: set[int] = field(default_factory=set)
    _run: set[int] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.simulator.graph

    def segment(self, number: int, stretch: Stretch, moment: Moment) -> None:
        graph, size = self.graph, self.graph.passing_nbytes
        model = SegmentModel(graph, self.simulator.device, self.simulator.slack, stretch.actions, stretch.copied)
        turns, passing = model.replay()
        before, self.live = self.live, self.live + model.arriving_nbytes
        self._move_host(stretch, len(self.instants))
        self._come(model.arriving, len(self.instants))
        now, noticeable = moment.begin_s, _NOTICEABLE * moment.end_s
        if now - moment.start_s > noticeable or not turns:
            self._add(number, moment, moment.start_s, now)
        for turn in turns:
            self._turn(number, moment, turn, now, before + turn.nbytes)
            now += turn.seconds
        if moment.end_s - now > noticeable:
            self._add(number, moment, now, moment.end_s)
        self._end(passing, len(self.instants))
        self.live -= sum(map(size, passing))
        self._run.update(model.ops)

    def close(self) -> None:
        """What is left ends with the step."""
        self._end([value for value, came in self._on_device.items() for _ in came], len(self.instants))
        self._leave_host(list(self._on_host), len(self.instants))

    def _turn(self, number: int, moment: Moment, turn: Turn, now: float, nbytes: int) -> None:
        here, size = len(self.instants), self.graph.passing_nbytes
        again = turn.op in self._run
        self.instants.append(
            Instant(number, turn.op, again, now, now + turn.seconds, nbytes, turn.extra_nbytes, moment.host_nbytes)
        )
        self._come(set(turn.makes).difference(turn.written_over), here)
        self._come(turn.written_over, here + 1)
        self._end(turn.ends, here + 1)
        self.live += sum(map(size, turn.makes)) - sum(map(size, turn.ends))

    def _add(self, number: int, moment: Moment, start_s: float, end_s: float) -> None:
        """Nothing is computed."""
        self.instants.append(Instant(number, -1, False, start_s, end_s, self.live, 0, moment.host_nbytes))

    def _come(self, values: Iterable[int], at: int) -> None:
        for value in values:
            if self.graph.passing_nbytes(value):
                self._on_device.setdefault(value, []).append(at)  # a result may be there still when it is made again

    def _end(self, values: Iterable[int], at: int) -> None:
        for value in values:
            came = self._on_device.get(value)
            if came and (first := came.pop(0)) < at:
                self.found.append(Lifetime(value, False, first, at))

    def _move_host(self, stretch: Stretch, at: int) -> None:
        """Values on the host at its peak in the segment, from here on; the others leave."""
        nbytes = self.graph.nbytes
        there, most = set(self._host), sum(map(nbytes, self._host))
        for value, comes in host_changes(stretch.actions, self._to_come):
            (self._host.add if comes else self._host.discard)(value)
            if sum(map(nbytes, self._host)) > most:
                there, most = set(self._host), sum(map(nbytes, self._host))
        self._leave_host(set(self._on_host) - there, at)
        for value in there - set(self._on_host):
            self._on_host[value] = at

    def _leave_host(self, values: Iterable[int], at: int) -> None:
        self.found.extend(Lifetime(value, True, self._on_host.pop(value), at) for value in values)
