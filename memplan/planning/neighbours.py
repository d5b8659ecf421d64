"""Better plans near a known one: free the choices about some values, hold the others, solve, ask the simulator.

Large-neighbourhood search (Shaw 1998) in the program of `planning/choices.py`. Neighbourhoods are stretches of the
program, or the same values of all its repeated blocks; they grow while they are solved at once and shrink when time
runs out on them. Where everything is free from the start, the program is solved as a whole.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np

from memplan.planning.choices import UNITS, Choices
from memplan.planning.planners.protocol import Proposal, rank
from memplan.planning.reach import Reach
from memplan.planning.trial import Trial, Trials
from memplan.planning.unfold import Demand

_DEPTHS = ((1, 8), (2, 12))  # kernels and operations of a chain of recomputations
_SIZE, _SHARE = 1500, 1 / 6  # choices of the first neighbourhood, at least, and as a share of all
_GROWS, _SHRINKS = 1.25, 0.7  # as solving goes
_SECONDS, _QUICK = 1.5, 0.3  # for one neighbourhood at most; what leaves room for a larger one
_PATIENCE = 12  # neighbourhoods without a better plan
_GAP = 0.002  # of a solution
_NEAR = 0.002 * UNITS  # above the relaxation, where it is not worth looking on


def improve(trials: Trials, best: Trial, until: float, seed: int = 0) -> Proposal:
    """The best plan found before `until` (of the monotonic clock), never worse than the given one."""
    draw = random.Random(seed)
    search = None
    for kernels, operations in _DEPTHS:
        if time.monotonic() < until:
            search = _Search(trials, best, kernels, operations, draw)
            best = search.run(until)
    gap_s = search.gap_s() if search is not None and best.proposal.fits else None
    return replace(best.proposal, gap_s=gap_s)


class _Search:
    """With chains of recomputations of one depth, and those of the plan it starts from."""

    def __init__(self, trials: Trials, best: Trial, kernels: int, operations: int, draw: random.Random):
        self.trials, self.best, self.draw = trials, best, draw
        layout = trials.layout
        again = Demand.of(layout, best.decisions).again
        made = ((op, segment) for segment, ops in enumerate(again) for op in ops)
        also = frozenset((value, segment) for op, segment in made for value in layout.graph.ops[op].outputs)
        reach = Reach(layout, trials.least_nbytes, kernels, operations, also)
        self.choices = Choices(trials.problem, reach, trials.simulator)
        self.variables = self.choices.variables()
        self.values = sorted(self.variables, key=lambda value: layout.home[value])
        self.count = sum(map(len, self.variables.values()))
        self.alike: dict[object, list[int]] = defaultdict(list)  # values that repeated blocks make in the same place
        for value in self.values:
            self.alike[self.role(value)].append(value)
        self.seen: dict[int, int] = {}  # the largest rest of segments that were found to be over the budget

    def role(self, value: int) -> tuple[object, ...]:
        op, known = self.choices.reach.op_of(value), self.choices.graph.values[value]
        return op.name, op.source, known.shape, known.dtype

    def run(self, until: float) -> Trial:
        size, stuck = max(_SIZE, _SHARE * self.count), 0
        start = self.accept(self.best)
        latest = self.best.decisions
        none = np.zeros(len(start), dtype=bool)
        least, now = self.choices.solver.relax().cost, self.choices.solver.solve(_SECONDS, _GAP, start, none).cost
        while now - least > _NEAR and stuck < _PATIENCE and (left := until - time.monotonic()) > 0:
            whole = size >= self.count
            began = time.monotonic()
            free = None if whole else self.neighbourhood(int(size))
            solution = self.choices.solver.solve(min(left, _SECONDS), _GAP, start, free)
            spent = time.monotonic() - began
            size *= _SHRINKS if spent > 0.9 * _SECONDS else _GROWS if spent < _QUICK else 1.0
            stuck += 1
            if solution.values is None:
                continue
            decisions = self.choices.decisions(solution.values)
            if whole and decisions == latest and spent < 0.9 * _SECONDS:
                break  # nothing was learned since it was found
            if decisions in (latest, self.best.decisions):
                continue
            latest = decisions
            found = self.trials.of(decisions)
            if rank(found.proposal) < rank(self.best.proposal):
                start, stuck, now = self.accept(found), 0, solution.cost
            else:
                self.learn(found)
        return self.best

    def gap_s(self) -> float:
        """Seconds from the relaxation to the best plan, both by the program and with the plan's own rests."""
        choices = self.choices
        choices.keep_to(choices.rests(self.best.decisions, self.best.peaks))
        start = choices.values(self.best.decisions)
        own = choices.solver.solve(_SECONDS, _GAP, start, np.zeros(len(start), dtype=bool))
        return max(0.0, own.cost - choices.solver.relax().cost) / choices.second

    def accept(self, found: Trial) -> np.ndarray:
        self.best = found
        self.learn(found)
        return self.choices.values(found.decisions)

    def learn(self, found: Trial) -> None:
        """Segments over the budget have more than was thought beside the choices; the best plan stays possible."""
        budget = self.trials.problem.budget_bytes
        for segment, rest in enumerate(self.choices.rests(found.decisions, found.peaks)):
            if found.peaks[segment] > budget:
                self.seen[segment] = max(self.seen.get(segment, rest), rest)
        own = self.choices.rests(self.best.decisions, self.best.peaks)
        rests = [
            min(max(rest, self.seen.get(segment, rest)), max(rest, rest + budget - peak))
            for segment, (rest, peak) in enumerate(zip(own, self.best.peaks, strict=True))
        ]
        self.choices.keep_to(rests)

    def neighbourhood(self, size: int) -> np.ndarray:
        """A flag per variable: is it free?"""
        free = np.zeros(len(self.choices.program.costs), dtype=bool)
        parts, alike = self.draw.choice((1, 2, 3)), self.draw.random() < 0.5
        left = size
        while left > 0:
            first = self.draw.randrange(len(self.values))
            part = left if parts == 1 else size // parts
            for value in self.values[first:]:
                for twin in self.alike[self.role(value)] if alike else (value,):
                    variables = self.variables[twin]
                    if variables and not free[variables[0]]:
                        free[variables] = True
                        left -= len(variables)
                        part -= len(variables)
                if min(left, part) <= 0:
                    break
        return free
