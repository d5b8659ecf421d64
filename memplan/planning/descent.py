"""Evict until it fits: repeatedly take the gap between two uses whose bytes at the overfull moments cost least.

Belady's choice (the next use far away) weighed by what bringing the value back costs: recomputation on the compute
stream, or copies on the link, which are cheap while the link has time to spare. A value is recomputed from what is on
the device anyway; what is not is recomputed with it, or kept longer where that is cheaper. Evictions of one round do
not rely on values that the same round evicts, but wait for the next: in a chain every other value goes, then every
other one of the rest.
After every round the whole plan is unfolded and simulated again, so what an eviction does to the moments of
recomputation is seen by the next round.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memplan.planning import cost
from memplan.planning.layout import Layout
from memplan.planning.plan import Kind, Plan
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.simulate import Simulator, Timeline
from memplan.planning.unfold import Decisions, Demand, Mode, unfold

_ROUNDS = 60
_LEAST_SHARE = 2e-4  # gaps of values smaller than this share of the budget are left alone
_PATIENCE = 0.9  # a move this much worse than one that has to wait for the next round waits too
_CHAIN = 64  # longest chain of values recomputed for one


Key = tuple[int, int]  # a value and the segment that uses it
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Move:
    """An eviction to be made: decisions to add, what it costs, what it frees and what it holds longer.

    Attributes:
      seconds: on the compute stream; copy_s: on the link, each way.
      frees, holds: (first segment, end segment, bytes), half-open.
      relies: values taken to be on the device because they are kept for a later use: not to be evicted before it.
      host_nbytes: host memory that it takes.
    """

    keys: tuple[Key, ...]
    mode: Mode
    seconds: float
    frees: tuple[Span, ...]
    holds: tuple[Span, ...] = ()
    copy_s: float = 0.0
    relies: frozenset[Key] = frozenset()
    host_nbytes: int = 0


@dataclass
class Descent:
    """Evictions for one problem, from none or from `decisions` made before.

    Attributes:
      name: of the planner, for its plans.
    """

    problem: Problem
    layout: Layout
    name: str
    decisions: dict[Key, Mode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.problem.graph, self.problem.device, self.problem.slack)
        self.op_seconds = [
            cost.op_seconds(self.problem.graph, op, self.problem.device) for op in self.problem.graph.ops
        ]
        self.least = max(1, int(self.problem.budget_bytes * _LEAST_SHARE))

    def descend(self) -> Proposal:
        """Rounds of evictions until the simulated peak is within the budget or nothing helps.

        Afterwards `decisions` are those of the plan that is proposed.
        """
        best, chosen = self.propose(self.decisions), dict(self.decisions)
        stuck = 0
        for _ in range(_ROUNDS):
            plan, timeline, over = self.overage(self.decisions)
            if timeline.peak_nbytes < best.timeline.peak_nbytes:
                best, chosen, stuck = self.proposal(plan, timeline), dict(self.decisions), 0
            else:
                stuck += 1
            if not over.any() or stuck > 4 or not self.evict(over):
                break
        self.decisions = chosen
        return best

    def propose(self, decisions: Decisions) -> Proposal:
        plan, timeline, _ = self.overage(decisions)
        return self.proposal(plan, timeline)

    def proposal(self, plan: Plan, timeline: Timeline) -> Proposal:
        return Proposal(plan, timeline, self.problem.is_kept_by(timeline))

    def overage(self, decisions: Decisions) -> tuple[Plan, Timeline, np.ndarray]:
        """The plan, its timeline, and per segment of the layout the bytes above the budget."""
        actions, origins = unfold(self.layout, decisions)
        problem = self.problem
        plan = Plan(actions, problem.graph.fingerprint, self.name, problem.device.name)
        timeline = self.simulator.run(plan)
        over = np.zeros(len(self.layout.segments))
        for origin, moment in zip(origins, timeline.moments, strict=True):
            over[origin] = max(over[origin], moment.device_nbytes - problem.budget_bytes)
        self.host_left = problem.host_budget_bytes - timeline.host_peak_nbytes
        self.compute_s = timeline.compute_s
        self.link_s = sum(copy.end_s - copy.start_s for copy in timeline.copies if copy.direction is Kind.PREFETCH)
        return plan, timeline, over

    def evict(self, over: np.ndarray) -> bool:
        """Add evictions until, by the sum of live bytes alone, nothing is over; False if none was found.

        Best first. Others' scores fall as a move is made, so a move is scored again only when it comes to the top.
        """
        moves = list(self.moves(over))
        left = over.copy()
        waiting = [(-score, number) for number, move in enumerate(moves) if (score := self.score(move, left)) > 0]
        heapq.heapify(waiting)
        taken: set[Key] = set()
        relied: set[Key] = set()
        worth_waiting = 0.0  # for the next round, which may make the moves that had to wait
        while waiting and left.any():
            _, number = heapq.heappop(waiting)
            move, score = moves[number], self.score(moves[number], left)
            if score <= 0 or not taken.isdisjoint(move.keys) or move.host_nbytes > self.host_left:
                continue
            if not taken.isdisjoint(move.relies) or not relied.isdisjoint(move.keys):
                worth_waiting = max(worth_waiting, _PATIENCE * score)
                continue
            if waiting and -score > waiting[0][0]:
                heapq.heappush(waiting, (-score, number))
                continue
            if score < worth_waiting:
                break
            self.apply(move, left)
            taken.update(move.keys)
            relied.update(move.relies)
        return bool(taken)

    def score(self, move: Move, over: np.ndarray) -> float:
        return self.gain(move, over) / (self.price(move) + 1e-7)

    def price(self, move: Move) -> float:
        """Seconds that a move adds to the step: its computations, and its copies once the link has no time left.

        A direction of the link is useful during about half of the step: values leave in one half and return in the
        other.
        """
        if not move.copy_s:
            return move.seconds
        late = max(0.0, self.link_s + move.copy_s - 0.5 * self.compute_s)
        return move.seconds + 0.05 * move.copy_s + min(move.copy_s, late)

    def gain(self, move: Move, over: np.ndarray) -> float:
        """Byte-segments that the move takes off the overfull ones."""
        gained = 0.0
        for first, end, nbytes in move.frees:
            gained += float(np.minimum(over[first:end], nbytes).sum())
        for first, end, nbytes in move.holds:
            gained -= nbytes * float((over[first:end] > 0).sum())
        return gained

    def apply(self, move: Move, over: np.ndarray) -> None:
        self.decisions.update(dict.fromkeys(move.keys, move.mode))
        self.link_s += move.copy_s
        self.host_left -= move.host_nbytes
        for first, end, nbytes in move.frees:
            over[first:end] = np.maximum(over[first:end] - nbytes, 0)
        for first, end, nbytes in move.holds:
            over[first:end] += np.where(over[first:end] > 0, nbytes, 0)

    def moves(self, over: np.ndarray) -> Iterator[Move]:
        """Every way to end the life of a value early that touches an overfull segment."""
        demand = Demand.of(self.layout, self.decisions)
        self.events = demand.events(self.layout)
        self.alive = _alive(self.events, self.decisions)
        crowded = np.concatenate([[0], np.cumsum(over > 0)])
        together: dict[frozenset[int], list[Move]] = {}  # drops that need the same values held longer
        for value, sequence in self.events.items():
            nbytes = self.simulator.graph.passing_nbytes(value)
            if nbytes < self.least or value in self.layout.returned:
                continue
            for (before, _), (number, is_use) in pairwise(sequence):
                if not is_use and over[number] > 0:
                    yield from self.instead_moves(value, number, demand.again[number])
                if not is_use or crowded[number] == crowded[before + 1]:
                    continue
                gap = (before + 1, number, nbytes)
                mode = self.decisions.get((value, number))
                if mode is None:
                    yield from self.drop_moves(value, gap, together)
                yield from self.offload_moves(value, gap, mode)
        yield from (_united(moves) for moves in together.values() if len(moves) > 1)

    def drop_moves(self, value: int, gap: Span, together: dict[frozenset[int], list[Move]]) -> Iterator[Move]:
        for keep_kernels in (False, True):
            chain = self.chain(value, gap[1], keep_kernels)
            if chain is None:
                continue
            keys, seconds, holds, relies = chain
            move = Move(keys, Mode.DROP, seconds, (gap,), tuple(holds.values()), relies=relies)
            yield move
            if keep_kernels and holds:
                together.setdefault(frozenset(holds), []).append(move)
            if not holds and not keep_kernels:
                return

    def offload_moves(self, value: int, gap: Span, mode: Mode | None) -> Iterator[Move]:
        first, number, nbytes = gap
        key, copy_s = ((value, number),), cost.copy_seconds(nbytes, self.problem.device)
        if mode is None and nbytes <= self.host_left:
            if number - first > 3:
                yield Move(
                    key, Mode.OFFLOAD, 0.0, ((first + 1, number - 1, nbytes),), copy_s=copy_s, host_nbytes=nbytes
                )
            yield Move(key, Mode.OFFLOAD_NOW, 2 * copy_s, (gap,), copy_s=copy_s, host_nbytes=nbytes)
        elif mode is Mode.OFFLOAD:
            ends = ((first, first + 1, nbytes), (number - 1, number, nbytes))
            yield Move(key, Mode.OFFLOAD_NOW, 2 * copy_s, ends)

    def instead_moves(self, value: int, number: int, again: Iterable[int]) -> Iterator[Move]:
        """A copy from the host where a crowded segment would compute again what it reads, in several kernels maybe."""
        nbytes = self.simulator.graph.passing_nbytes(value)
        if (value, number) not in self.decisions or value not in self.layout.reads[number] or nbytes > self.host_left:
            return
        ops, copy_s = self.problem.graph.ops, cost.copy_seconds(nbytes, self.problem.device)
        behind = sum(self.simulator.graph.passing_nbytes(made) for op in again for made in ops[op].outputs)
        frees = ((number, number + 1, behind - nbytes),)
        yield Move(((value, number),), Mode.OFFLOAD_NOW, 2 * copy_s, frees, copy_s=copy_s, host_nbytes=nbytes)

    def chain(
        self, value: int, number: int, keep_kernels: bool
    ) -> tuple[tuple[Key, ...], float, dict[int, Span], frozenset[Key]] | None:
        """What dropping a value before `number` drags along: (decisions, seconds, values held longer, relied upon).

        With `keep_kernels` no kernel runs again: what a kernel made is held instead.
        """
        graph = self.problem.graph
        keys: dict[Key, None] = {}
        holds: dict[int, Span] = {}
        relies: set[Key] = set()
        seconds = 0.0
        waiting = [value]
        while waiting:
            current = waiting.pop()
            made = graph.producer[current]
            assert made is not None
            op = graph.ops[made]
            if not op.recomputable or len(keys) >= _CHAIN:
                return None
            if (current, number) in keys:
                continue
            keys[current, number] = None
            seconds += self.op_seconds[made]
            for source in self.layout.carriers[made]:
                if (source, number) in keys or source in holds or source in self.layout.returned:
                    continue
                if self.is_alive(source, number):
                    relies.add((source, self.next_event(source, number)))
                    continue
                size = self.simulator.graph.passing_nbytes(source)
                last = self.last_event(source, number)
                small = size * 16 <= self.simulator.graph.passing_nbytes(value) or size < self.least
                source_op = graph.ops[graph.producer[source] or 0]
                if small or (keep_kernels and source_op.fusion == "kernel") or not source_op.recomputable:
                    if size >= self.least:
                        holds[source] = (last + 1, number, size)
                else:
                    waiting.append(source)
        relies -= {(source, number) for source, _ in relies}  # used there in any case: remade if it is evicted
        return tuple(keys), seconds, holds, frozenset(relies)

    def is_alive(self, value: int, number: int) -> bool:
        """On the device at segment `number` in any case: read there, or kept across it."""
        return any(first <= number <= last for first, last in self.alive.get(value, ()))

    def last_event(self, value: int, number: int) -> int:
        return max((event for event, _ in self.events[value] if event < number), default=self.layout.home[value])

    def next_event(self, value: int, number: int) -> int:
        """The event at `number`, or the first behind it."""
        return min(event for event, _ in self.events[value] if event >= number)


def _united(moves: list[Move]) -> Move:
    """Drops that hold the same values, made together: the values are held once, for the longest."""
    keys = tuple(dict.fromkeys(key for move in moves for key in move.keys))
    holds: dict[tuple[int, int], Span] = {}
    for first, end, nbytes in (span for move in moves for span in move.holds):
        known = holds.get((first, nbytes))
        holds[first, nbytes] = (first, max(end, known[1] if known else 0), nbytes)
    frees = tuple(span for move in moves for span in move.frees)
    relies = frozenset(key for move in moves for key in move.relies)
    return Move(keys, Mode.DROP, sum(move.seconds for move in moves), frees, tuple(holds.values()), relies=relies)


def _alive(events: dict[int, list[tuple[int, bool]]], decisions: Decisions) -> dict[int, list[tuple[int, int]]]:
    """Closed spans of segments in which each value is on the device."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for value, sequence in events.items():
        own: list[tuple[int, int]] = []
        for number, is_use in sequence:
            if own and is_use and (value, number) not in decisions:
                own[-1] = (own[-1][0], number)
            else:
                own.append((number, number))
        spans[value] = own
    return spans
