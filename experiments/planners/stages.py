"""Stages: what a planner needs to know of a step, and nothing else. Plain data, no graph, no jax.

A *stage* runs its own work for the first time. Before it, items made earlier may be recomputed. An *item* is made
by one stage, used by later ones, and there only as long as somebody still needs its last copy.
Within a stage items are recomputed in the order of their first computation, each at most once.

Bytes at the own work of a stage: its working bytes, the items it makes and uses, and those kept for later.
Bytes at a recomputation: the item, what it is computed from, and whatever the stage or a later one still needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Recomputation = tuple[int, int]
"""An item, and the stage before whose own work it is recomputed."""


@dataclass(frozen=True)
class Stages:
    """The problem. Items and stages are indices; items are numbered in the order of their first computation."""

    # Per item.
    nbytes: tuple[int, ...]
    ticks: tuple[int | None, ...]  # the time to recompute it, in whole ticks; None where that is not allowed
    inputs: tuple[tuple[int, ...], ...]  # the items it is computed from
    home: tuple[int, ...]  # the stage that makes it
    uses: tuple[tuple[int, ...], ...]  # the stages whose own work reads it, ascending, its home left out
    # Per stage.
    working_nbytes: tuple[int, ...]  # device bytes besides the items; below zero where items share buffers
    own_ticks: tuple[int, ...]  # the time of its own work
    budget_bytes: int  # what the device bytes may reach

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.working_nbytes)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage makes."""
        return _inverse(((stage,) for stage in self.home), self.count)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage's own work uses."""
        return _inverse(self.uses, self.count)

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """Items that are computed from each item."""
        return _inverse(self.inputs, len(self.nbytes))

    @cached_property
    def least_nbytes(self) -> tuple[int, ...]:
        """Per stage, the working set of its own work: no plan goes below it."""
        size = self.nbytes
        return tuple(
            working + sum(size[item] for item in made) + sum(size[item] for item in read)
            for working, made, read in zip(self.working_nbytes, self.made, self.reads, strict=True)
        )

    @cached_property
    def last_need(self) -> tuple[int, ...]:
        """Last stage at which each item can be of any use, whatever is recomputed."""
        last = [max((home, *uses)) for home, uses in zip(self.home, self.uses, strict=True)]
        for item in reversed(range(len(last))):
            for dependent in self.dependents[item]:
                if self.ticks[dependent] is not None:
                    last[item] = max(last[item], last[dependent])
        return tuple(last)

    def refine(self, runs: int) -> Stages:
        """The same problem with `runs - 1` empty stages before each: recomputations in any order of so many runs.

        Stage `t` becomes `t * runs + runs - 1`.
        """
        if runs == 1:
            return self

        def later(stage: int) -> int:
            return stage * runs + runs - 1

        def spread(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(number for last in numbers for number in (*(0,) * (runs - 1), last))

        return replace(
            self,
            home=tuple(map(later, self.home)),
            uses=tuple(tuple(map(later, stages)) for stages in self.uses),
            working_nbytes=spread(self.working_nbytes),
            own_ticks=spread(self.own_ticks),
        )


def _inverse(lists: Iterable[Iterable[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """For each of `count` numbers, the positions of the lists that have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for position, numbers in enumerate(lists):
        for number in numbers:
            found[number].append(position)
    return tuple(map(tuple, found))


def stages_of_nodes(
    nbytes: Sequence[int], ticks: Sequence[int], inputs: Sequence[Iterable[int]], budget_bytes: int
) -> Stages:
    """Every node a stage of its own, in the given order; any of them may be recomputed."""
    count, sources = len(nbytes), tuple(tuple(sorted(set(numbers))) for numbers in inputs)
    items = tuple(nbytes), tuple(ticks), sources, tuple(range(count)), _inverse(sources, count)
    return Stages(*items, working_nbytes=(0,) * count, own_ticks=tuple(ticks), budget_bytes=budget_bytes)


@dataclass(frozen=True)
class Replay:
    """The stages with a set of recomputations."""

    steps: tuple[tuple[int, int], ...]  # (stage, item) in running order; item -1 is the stage's own work
    step_nbytes: tuple[int, ...]  # device bytes at each step
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per item, closed: the stages in which each of its copies is there

    @property
    def peak_nbytes(self) -> int:
        return max(self.step_nbytes, default=0)


def replay(stages: Stages, recomputed: Iterable[Recomputation]) -> Replay:
    """Run the stages with these recomputations. A copy stays until the last need before the next copy is made."""
    due: list[list[int]] = [[] for _ in range(stages.count)]
    for item, stage in recomputed:
        due[stage].append(item)
    steps: list[tuple[int, int]] = []
    made_at: list[int] = []  # per copy: step, item, last step that needs it
    made_of: list[int] = []
    ends_at: list[int] = []
    current = [-1] * len(stages.nbytes)
    for stage in range(stages.count):
        again = [(item, stages.inputs[item], (item,)) for item in sorted(due[stage])]
        for label, reads, writes in (*again, (-1, stages.reads[stage], stages.made[stage])):
            here = len(steps)
            for item in reads:
                ends_at[current[item]] = here
            for item in writes:
                current[item] = len(made_at)
                made_at.append(here)
                made_of.append(item)
                ends_at.append(here)
            steps.append((stage, label))
    change = [0] * (len(steps) + 1)
    spans: list[list[tuple[int, int]]] = [[] for _ in stages.nbytes]
    for first, item, last in zip(made_at, made_of, ends_at, strict=True):
        change[first] += stages.nbytes[item]
        change[last + 1] -= stages.nbytes[item]
        spans[item].append((steps[first][0], steps[last][0]))
    live, nbytes = 0, []
    for (stage, item), difference in zip(steps, change, strict=False):
        live += difference
        nbytes.append(live + (stages.working_nbytes[stage] if item < 0 else 0))
    return Replay(tuple(steps), tuple(nbytes), tuple(map(tuple, spans)))


def extra_ticks(stages: Stages, recomputed: Iterable[Recomputation]) -> int:
    """Time of the recomputations."""
    return sum(stages.ticks[item] or 0 for item, _ in recomputed)


def fits(stages: Stages, recomputed: Iterable[Recomputation]) -> bool:
    """Do these recomputations keep every step within the budget?"""
    return replay(stages, recomputed).peak_nbytes <= stages.budget_bytes


@dataclass(frozen=True)
class Answer:
    """A planner's plan, or why there is none."""

    recomputed: frozenset[Recomputation] | None  # of `Stages.refine(runs)`; None where no plan was found
    extra_ticks: int  # their time
    bound_ticks: int  # every plan takes at least this much extra time
    # Proven among plans that go through the items of a stage `runs` times; "unknown": neither a plan nor a proof.
    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    runs: int = 1
    stage: int = -1  # that alone makes it infeasible
    stage_nbytes: int = 0  # at least, there
