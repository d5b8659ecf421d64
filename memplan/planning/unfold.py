"""Decisions -> actions: what to do about a value before each of its later uses becomes an ordered plan.

A decision belongs to a value and the segment that uses it next: keep it until then (the default), move it to the host
and back, or drop it and compute it again there. Views, and whatever else is transparent in the layout, are not decided
about: they run again wherever they are read. Returned values stay, whatever is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from memplan.planning.delay import delayed
from memplan.planning.layout import Layout
from memplan.planning.plan import FENCE, Action, Kind, Plan


class Mode(Enum):
    """What happens to a value between a use and the next one; absent from the decisions: it is kept."""

    DROP = "recompute"
    OFFLOAD = "offload"  # copies overlap with a neighbouring segment
    OFFLOAD_NOW = "offload, waiting for the copies"


Decisions = Mapping[tuple[int, int], Mode]  # (value, segment that uses it) -> mode


def keep_everything(layout: Layout, device: str) -> Plan:
    """The plan that cuts the program into segments and changes nothing else."""
    actions, _ = unfold(layout, {})
    return Plan(actions, layout.graph.fingerprint, "keep", device)


@dataclass(frozen=True)
class Demand:
    """Who needs what from before, once decisions are made.

    Attributes:
      uses: value -> segments that take it from before (kept or brought back), ascending.
      again: segment -> ops computed again there.
    """

    uses: dict[int, list[int]]
    again: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, layout: Layout, decisions: Decisions) -> Demand:
        uses: dict[int, list[int]] = {}
        again: list[frozenset[int]] = [frozenset()] * len(layout.segments)
        for number in reversed(range(len(layout.segments))):
            ops: set[int] = set()
            taken: list[int] = []
            seen: set[int] = set()
            waiting = list(layout.reads[number])
            while waiting:
                value = waiting.pop()
                if value in seen:
                    continue
                seen.add(value)
                if decisions.get((value, number)) is Mode.DROP:
                    op = layout.graph.producer[value]
                    assert op is not None
                    ops.add(op)
                    waiting.extend(layout.carriers[op])
                else:
                    taken.append(value)
            remade = _remade(layout, number, taken, ops)
            ops |= remade
            for value in taken:
                if layout.graph.producer[value] not in ops:  # else it is made again as a sibling of what was dropped
                    uses.setdefault(value, []).append(number)
            again[number] = frozenset(ops)
        for segments in uses.values():
            segments.reverse()
        return cls(uses, tuple(again))

    def events(self, layout: Layout) -> dict[int, list[tuple[int, bool]]]:
        """value -> (segment, is it a use of an earlier copy?) in order, the first computation included."""
        found = {value: [(home, False)] for value, home in layout.home.items()}
        for number, ops in enumerate(self.again):
            for op in ops:
                for value in layout.graph.ops[op].outputs:
                    found[value].append((number, False))
        for value, segments in self.uses.items():
            found[value].extend((number, True) for number in segments)
        for sequence in found.values():
            sequence.sort()
        return found


def _remade(layout: Layout, number: int, taken: Sequence[int], again: Collection[int]) -> set[int]:
    """Ops that make fleeting values again in a segment that has, or makes, all that they are computed from."""
    there = set(taken)
    found: set[int] = set()
    for value in taken:
        if value not in layout.fleeting:
            continue
        ops: set[int] = set()
        waiting = [value]
        while waiting:
            op = layout.graph.producer[waiting.pop()]
            if op is None or op in again or op in found or op in ops:
                continue
            known = layout.graph.ops[op]
            if known.fusion == "kernel" or not known.recomputable:
                break
            ops.add(op)
            waiting.extend(
                source
                for source in layout.carriers[op]
                if source in layout.fleeting or (source not in there and layout.home[source] != number)
            )
        else:
            found |= ops
    return found


def unfold(layout: Layout, decisions: Decisions) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """The actions of a plan, and for each of its segments the segment of `layout` that it serves."""
    return _Unfolding(layout, decisions, Demand.of(layout, decisions)).run()


@dataclass
class _Unfolding:
    layout: Layout
    decisions: Decisions
    demand: Demand
    segments: list[list[Action]] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    on_device: set[int] = field(default_factory=set)
    on_host: set[int] = field(default_factory=set)
    made_in: dict[int, int] = field(default_factory=dict)  # device value -> emitted segment of its last event
    late: list[tuple[int, int]] = field(default_factory=list)  # (value, emitted segment before whose end it may not go)
    viewed: set[int] = field(default_factory=set)  # transparent ops run in the current segment

    def run(self) -> tuple[tuple[Action, ...], tuple[int, ...]]:
        self.following = self.demand.events(self.layout)
        self.fetched_last = {
            value: max(number for number in numbers if self.moves(value, number))
            for value, numbers in self.demand.uses.items()
            if any(self.moves(value, number) for number in numbers)
        }
        for number, ops in enumerate(self.layout.segments):
            self.begin(number)
            for op in self.sequence(number, ops):
                if self.layout.is_heavy(op) and self.has_heavy():
                    self.begin(number)
                self.compute(op, number)
            self.end(number)
        for value in self.layout.graph.outputs:
            self.view(value)
        self.close_views(keep=self.layout.graph.returned)
        for value, _ in self.late:
            self.segments[-1].append(Action(Kind.FREE, value))
        actions: list[Action] = []
        for position, segment in enumerate(self.segments):
            actions.extend([FENCE, *segment] if position else segment)
        return tuple(actions), tuple(self.origins)

    def moves(self, value: int, number: int) -> bool:
        mode = self.decisions.get((value, number))
        return mode in (Mode.OFFLOAD, Mode.OFFLOAD_NOW) and value not in self.layout.returned

    def begin(self, number: int) -> None:
        """Start a new segment of the plan."""
        self.close_views()
        ripe = [value for value, after in self.late if after < len(self.segments)]
        self.late = [(value, after) for value, after in self.late if after >= len(self.segments)]
        if self.segments:
            self.segments[-1].extend(Action(Kind.FREE, value) for value in ripe)
        self.segments.append([])
        self.origins.append(number)

    def has_heavy(self) -> bool:
        return any(a.kind is Kind.COMPUTE and self.layout.is_heavy(a.target) for a in self.segments[-1])

    def sequence(self, number: int, ops: Sequence[int]) -> list[int]:
        """The segment's ops, each preceded by what must be computed again for it, as late as possible."""
        again = set(self.demand.again[number])
        carriers, producer = self.layout.carriers, self.layout.graph.producer
        result: list[int] = []
        for op in ops:
            waiting = [(op, iter(carriers[op]))]  # depth first; chains are longer than Python's stack
            while waiting:
                current, values = waiting[-1]
                made = next((made for value in values if (made := producer[value]) in again), None)
                if made is None:
                    waiting.pop()
                    result.append(current)
                else:
                    again.discard(made)
                    waiting.append((made, iter(carriers[made])))
        if sum(map(self.layout.is_heavy, result)) > 1:
            result = delayed(self.layout, result, self.needed_after(number, result))
        self.last_read = {value: op for op in result for value in self.layout.carriers[op]}
        return result

    def needed_after(self, number: int, ops: Sequence[int]) -> set[int]:
        """Values that the ops read or make and that stay on the device for a later segment."""
        values = {value for op in ops for value in (*self.layout.carriers[op], *self.layout.graph.ops[op].outputs)}
        return {value for value in values if self.stays(value, number)}

    def compute(self, op: int, number: int) -> None:
        graph = self.layout.graph
        for value in self.layout.carriers[op]:
            if value not in self.on_device:
                self.prefetch(value, number)
        for value in graph.ops[op].inputs:
            self.view(value)
        self.segments[-1].append(Action(Kind.COMPUTE, op))
        here = len(self.segments) - 1
        for value in graph.ops[op].outputs:
            self.on_device.add(value)
            self.made_in[value] = here
            if self.fetched_last.get(value, -1) > number and value not in self.on_host:
                self.segments[-1].append(Action(Kind.OFFLOAD, value))
                self.on_host.add(value)
            if value not in self.last_read:
                self.leave(value, number)
        for value in self.layout.carriers[op]:
            if self.last_read[value] == op:
                self.leave(value, number)

    def prefetch(self, value: int, number: int) -> None:
        now = self.decisions[value, number] is Mode.OFFLOAD_NOW
        early = len(self.segments) - (1 if now else 2)
        self.segments[max(early, self.made_in[value] + 1)].insert(0, Action(Kind.PREFETCH, value))
        self.on_device.add(value)

    def leave(self, value: int, number: int) -> None:
        """The segment is done with a value: free it unless it is kept for later."""
        self.made_in[value] = len(self.segments) - 1 if value in self.made_in else 0
        if self.stays(value, number):
            return
        later = self.later(value, number)
        self.on_device.discard(value)
        here = len(self.segments) - 1
        returns = later[0] if later is not None and later[1] else 0
        if returns > number + 1 and self.decisions[value, returns] is Mode.OFFLOAD and self.is_new(value, here):
            self.late.append((value, here + 1))
            self.made_in[value] = here + 1  # it comes back after it has left
        else:
            self.segments[-1].append(Action(Kind.FREE, value))

    def later(self, value: int, number: int) -> tuple[int, bool] | None:
        """What happens to a value next behind a segment: see `Demand.events`."""
        return next((event for event in self.following[value] if event[0] > number), None)

    def stays(self, value: int, number: int) -> bool:
        """Is it on the device from this segment to a later one?"""
        later = self.later(value, number)
        kept = later is not None and later[1] and not self.moves(value, later[0])
        return value in self.layout.returned or kept

    def is_new(self, value: int, here: int) -> bool:
        """Was its copy to the host started in the current segment?"""
        return Action(Kind.OFFLOAD, value) in self.segments[here]

    def end(self, number: int) -> None:
        for value in [value for value in self.on_host if self.fetched_last[value] == number]:
            self.segments[-1].append(Action(Kind.RELEASE, value))
            self.on_host.discard(value)

    def view(self, value: int) -> None:
        """Run a transparent op (and those behind it) in the current segment."""
        graph = self.layout.graph
        op = graph.producer[value]
        if op is None or op not in self.layout.transparent or op in self.viewed:
            return
        for source in graph.ops[op].inputs:
            self.view(source)
        self.viewed.add(op)
        self.segments[-1].append(Action(Kind.COMPUTE, op))

    def close_views(self, keep: frozenset[int] = frozenset()) -> None:
        for op in sorted(self.viewed):
            ends = (value for value in self.layout.graph.ops[op].outputs if value not in keep)
            self.segments[-1].extend(Action(Kind.FREE, value) for value in ends)
        self.viewed.clear()
