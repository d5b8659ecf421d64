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
    """The problem. Items and stages are indices; items are numbered in the order of their first computation.

    Attributes:
      nbytes: per item.
      ticks: per item, the time to recompute it, None where that is not allowed. Times are whole ticks.
      inputs: per item, the items it is computed from.
      home: per item, the stage that makes it.
      uses: per item, the stages whose own work reads it, ascending, its home left out.
      working_nbytes: per stage, device bytes besides the items; below zero where items share buffers.
      own_ticks: per stage, the time of its own work.
      budget_bytes: what the device bytes may reach.
    """

    nbytes: tuple[int, ...]
    ticks: tuple[int | None, ...]
    inputs: tuple[tuple[int, ...], ...]
    home: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    working_nbytes: tuple[int, ...]
    own_ticks: tuple[int, ...]
    budget_bytes: int

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.working_nbytes)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage makes."""
        found: list[list[int]] = [[] for _ in self.working_nbytes]
        for item, stage in enumerate(self.home):
            found[stage].append(item)
        return tuple(map(tuple, found))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage's own work uses."""
        found: list[list[int]] = [[] for _ in self.working_nbytes]
        for item, stages in enumerate(self.uses):
            for stage in stages:
                found[stage].append(item)
        return tuple(map(tuple, found))

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """Items that are computed from each item."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for item, sources in enumerate(self.inputs):
            for source in sources:
                found[source].append(item)
        return tuple(map(tuple, found))

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


def stages_of_nodes(
    nbytes: Sequence[int], ticks: Sequence[int], inputs: Sequence[Iterable[int]], budget_bytes: int
) -> Stages:
    """Every node a stage of its own, in the given order; any of them may be recomputed."""
    uses: list[list[int]] = [[] for _ in nbytes]
    for node, sources in enumerate(inputs):
        for source in set(sources):
            uses[source].append(node)
    return Stages(
        nbytes=tuple(nbytes),
        ticks=tuple(ticks),
        inputs=tuple(tuple(sorted(set(sources))) for sources in inputs),
        home=tuple(range(len(nbytes))),
        uses=tuple(map(tuple, uses)),
        working_nbytes=(0,) * len(nbytes),
        own_ticks=tuple(ticks),
        budget_bytes=budget_bytes,
    )


@dataclass(frozen=True)
class Replay:
    """What a set of recomputations amounts to.

    Attributes:
      steps: (stage, item) in running order; item -1 is the stage's own work.
      step_nbytes: device bytes at each step.
      spans: per item, (first stage, last stage) in which each of its copies is there, closed.
    """

    steps: tuple[tuple[int, int], ...]
    step_nbytes: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

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
        for item in sorted(due[stage]):
            here = len(steps)
            for source in stages.inputs[item]:
                ends_at[current[source]] = here
            current[item] = len(made_at)
            made_at.append(here)
            made_of.append(item)
            ends_at.append(here)
            steps.append((stage, item))
        here = len(steps)
        for item in stages.reads[stage]:
            ends_at[current[item]] = here
        for item in stages.made[stage]:
            current[item] = len(made_at)
            made_at.append(here)
            made_of.append(item)
            ends_at.append(here)
        steps.append((stage, -1))
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
    """What a planner found.

    Attributes:
      recomputed: by the plan, None where none was found.
      runs: how often a stage may go through the items it recomputes; `recomputed` is of `Stages.refine(runs)`.
      extra_ticks: their time.
      bound_ticks: every plan takes at least this much extra time.
      status: `optimal` is proven among plans that go through the items of a stage `runs` times, `infeasible` likewise;
        `unknown`: no plan was found and no proof either.
      stage, stage_nbytes: where infeasible by one stage alone: which, and the least bytes there; else -1, 0.
    """

    recomputed: frozenset[Recomputation] | None
    extra_ticks: int
    bound_ticks: int
    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    runs: int = 1
    stage: int = -1
    stage_nbytes: int = 0
