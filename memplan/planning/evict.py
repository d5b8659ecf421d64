"""Evict until it fits, on stages: the first plan of every search, found in one sweep after another.

Take the gap between two needs whose bytes at the crowded stages cost the least extra time to free. What the repetition
is computed from is there anyway, or held longer, or computed again with it: whichever is cheaper. After every sweep the
plan is replayed. At the end every repetition that the budget does not need is taken back, dearest first.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memplan.planning.stages import Pair, Replay, Stages, replay

_PATIENCE = 4  # sweeps that do not help before something is taken back
_MOST_SHAKES = 200
_SHORT_CHAIN = 6  # items repeated for one, at first; more when sweeps stop helping
_LONGEST_CHAIN = 40
_STRICT = 0.7  # a move whose worth fell this far below its first estimate waits for the next sweep
_Gap = tuple[int, int, int]  # an item, the first stage without it, the one that needs it again


@dataclass(frozen=True)
class _Move:
    """Repetitions made together, their time, and the stages whose bytes they free or take: (first, end, bytes)."""

    pairs: tuple[Pair, ...]
    ticks: int
    frees: tuple[int, int, int]
    holds: tuple[tuple[int, int, int], ...]
    relies: frozenset[int]


def evict(stages: Stages, start: Collection[Pair] = (), seconds: float = 60.0) -> frozenset[Pair]:
    """Repetitions with which the stages fit the budget, or nearly so if the sweeps end before."""
    until = time.monotonic() + seconds
    again, draw = set(start), random.Random(0)
    best, least, stuck, shaken = set(again), float("inf"), 0, 0
    while time.monotonic() < until and shaken < _MOST_SHAKES:
        played = replay(stages, again)
        over = _over(stages, played)
        total = float(over.sum())
        if not total:
            return frozenset(again)
        stuck = 0 if total < least else stuck + 1
        if total < 1.001 * least:
            best, least = set(again), min(total, least)
        if stuck > (1 if shaken else _PATIENCE):
            again, stuck, shaken = set(best), 0, shaken + 1
            _shake(again, draw.choice(np.flatnonzero(over).tolist()), draw)
            continue
        longest = min(_LONGEST_CHAIN, _SHORT_CHAIN * 2 ** (1 if shaken else stuck))
        if not _Sweep(stages, again, played, over, longest, draw, 0.7 if shaken else 0.0).run():
            stuck += 1
    return frozenset(best)


def _shake(again: set[Pair], stage: int, draw: random.Random) -> None:
    """Take back some of the repetitions near a stage that stays crowded."""
    near = sorted((item, there) for item, there in again if abs(there - stage) <= 12)
    again.difference_update(pair for pair in near if draw.random() < (0.7 if pair[1] == stage else 0.3))


def prune(stages: Stages, again: Collection[Pair], seconds: float = 10.0) -> frozenset[Pair]:
    """Take back what the budget does not need: one repetition at a time, dearest first, then what nobody uses."""
    until = time.monotonic() + seconds
    kept = set(again)
    for pair in sorted(kept, key=lambda pair: (-(stages.ticks[pair[0]] or 0), pair)):
        if time.monotonic() > until:
            break
        kept.discard(pair)
        if replay(stages, kept).peak_nbytes > stages.budget_bytes:
            kept.add(pair)
    return frozenset(kept)


def _over(stages: Stages, played: Replay) -> np.ndarray:
    """Per stage, the bytes above the budget at its worst step."""
    over = np.zeros(stages.count)
    for (stage, _), nbytes in zip(played.steps, played.step_nbytes, strict=True):
        over[stage] = max(over[stage], nbytes - stages.budget_bytes)
    return over


@dataclass
class _Sweep:
    stages: Stages
    again: set[Pair]
    played: Replay
    over: np.ndarray
    longest: int
    random: random.Random
    noise: float
    taken: set[int] = field(default_factory=set)
    relied: set[int] = field(default_factory=set)

    def run(self) -> bool:
        """Make moves, best first, until nothing is crowded by the sum alone; False if there was none."""
        self.crowded = np.concatenate([[0], np.cumsum(self.over > 0)])
        self.needs = self._needs()
        left = self.over.copy()
        waits = np.zeros(
            self.stages.count
        )  # per stage: worth of the best move there that has to wait for the next sweep
        queue: list[tuple[float, int, _Move | _Gap]] = [
            (-promise, n, gap) for n, (promise, gap) in enumerate(self._gaps())
        ]
        heapq.heapify(queue)
        number, made = len(queue), False
        while queue and left.any():
            promise, _, move = heapq.heappop(queue)
            if not isinstance(move, _Move):
                hoped = self._hope(move, left)
                if hoped <= 0 or (made and hoped < _STRICT * waits[move[1] : move[2]].max(initial=0)):
                    continue
                if queue and hoped < -queue[0][0]:
                    heapq.heappush(queue, (-hoped, number := number + 1, move))
                    continue
                for way in self._repetitions(move):
                    number += 1
                    score = self._score(way, left) * self.random.uniform(1 - self.noise, 1)
                    if score > 0:
                        heapq.heappush(queue, (max(promise, -score), number, way))
                continue
            score = self._score(move, left)
            if score <= 0:
                continue
            first, end, _ = move.frees
            items = {item for item, _ in move.pairs}
            if self.taken & (items | move.relies) or self.relied & items:
                waits[first:end] = np.maximum(waits[first:end], score)
                continue
            if not self.noise and queue and score < -queue[0][0]:
                number += 1
                heapq.heappush(queue, (-score, number, move))
                continue
            if made and score < _STRICT * waits[first:end].max():
                continue
            self._apply(move, left)
            made = True
        return made

    def _apply(self, move: _Move, left: np.ndarray) -> None:
        self.again.update(move.pairs)
        self.taken.update(item for item, _ in move.pairs)
        self.relied.update(move.relies)
        first, end, nbytes = move.frees
        left[first:end] = np.maximum(left[first:end] - nbytes, 0)
        for first, end, nbytes in move.holds:
            left[first:end] += np.where(left[first:end] > 0, nbytes, 0)

    def _score(self, move: _Move, left: np.ndarray) -> float:
        first, end, nbytes = move.frees
        gained = float(np.minimum(left[first:end], nbytes).sum())
        for first, end, nbytes in move.holds:
            gained -= nbytes * float((left[first:end] > 0).sum())
        return gained / (move.ticks + 1)

    def _hope(self, gap: _Gap, left: np.ndarray) -> float:
        """What ending a gap could be worth at most."""
        item, low, event = gap
        nbytes = self.stages.nbytes[item]
        return float(np.minimum(left[low:event], nbytes).sum()) / ((self.stages.ticks[item] or 0) + 1)

    def _needs(self) -> list[set[int]]:
        """Stages in which each item is needed by the stage itself or by a repetition."""
        needs = [set(stages) for stages in self.stages.uses]
        for item, stage in self.again:
            for source in self.stages.inputs[item]:
                needs[source].add(stage)
        return needs

    def _gaps(self) -> Iterator[tuple[float, _Gap]]:
        """Gaps that touch crowded stages, and what ending them could be worth at most."""
        stages = self.stages
        for item, spans in enumerate(self.played.spans):
            ticks, nbytes = stages.ticks[item], stages.nbytes[item]
            if ticks is None or not nbytes:
                continue
            for first, last in spans:
                if self.crowded[last] == self.crowded[first]:
                    continue
                own = first == stages.home[item] or first in stages.uses[item]
                events = [first, *sorted(need for need in self.needs[item] if first < need <= last)]
                for before, event in pairwise(events):
                    low = before if before == first and not own else before + 1  # made again for a repetition only
                    relief = float(self.crowded[event] - self.crowded[low])
                    if relief:
                        yield relief * nbytes / (ticks + 1), (item, low, event)

    def _repetitions(self, gap: _Gap) -> Iterator[_Move]:
        """Ways to compute an item again at an event: absent inputs computed again, held, or the cheaper of both."""
        seen = set()
        for way in ("again", "hold", "cheaper"):
            move = self._chain(gap, way)
            if move is not None and (move.pairs, move.holds) not in seen:
                seen.add((move.pairs, move.holds))
                yield move

    def _chain(self, gap: _Gap, way: str) -> _Move | None:
        item, low, event = gap
        stages, pairs, ticks = self.stages, dict[int, None](), 0
        holds: list[tuple[int, int, int]] = []
        relies: set[int] = set()
        waiting = [item]
        relief = stages.nbytes[item] * int(self.crowded[event] - self.crowded[low])
        while waiting:
            current = waiting.pop()
            if current in pairs:
                continue
            cost = stages.ticks[current]
            too_late = bool(stages.until) and event > stages.until[current]
            if cost is None or too_late or len(pairs) >= self.longest:
                return None
            pairs[current] = None
            ticks += cost
            for source in stages.inputs[current]:
                if source in pairs or source in relies:
                    continue
                end = self._end_before(source, event)
                if end >= event:
                    relies.add(source)
                    continue
                burden = stages.nbytes[source] * int(self.crowded[event] - self.crowded[end + 1])
                if way == "hold" or stages.ticks[source] is None or (way == "cheaper" and burden <= 0.3 * relief):
                    relies.add(source)
                    holds.append((end + 1, event, stages.nbytes[source]))
                else:
                    waiting.append(source)
        own = tuple((other, event) for other in pairs)
        frees = (low, event, stages.nbytes[item])
        return _Move(own, ticks, frees, tuple(holds), frozenset(relies - set(pairs)))

    def _end_before(self, item: int, event: int) -> int:
        """Last stage of the copy that stands before an event, or of the last one before it."""
        spans = self.played.spans[item]
        end = spans[0][1]
        for first, last in spans[1:]:
            if first >= event:
                break
            end = last
        return end
