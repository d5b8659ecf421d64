"""Stages: all that a planner needs to know about a step, as plain data without graph or jax.

A *stage* does its own work once. Before that it may recompute items of earlier stages. An *item* is
computed by one stage, used by later ones, and live until the last need of its latest copy. Within a
stage, items are recomputed in the order of their first computation, each at most once.

The bytes during a stage's own work are its working bytes, the items it writes and reads, and the
items kept for later. The bytes during a recomputation are the item, its inputs, and everything that
this stage or a later one still needs.
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
    """The problem. Items and stages are indices; items are in order of first computation."""

    # Per item.
    nbytes: tuple[int, ...]
    ticks: tuple[int | None, ...]  # time to recompute it, in whole ticks; None: not allowed
    inputs: tuple[tuple[int, ...], ...]  # the items it is computed from
    home: tuple[int, ...]  # the stage that makes it
    uses: tuple[tuple[int, ...], ...]  # stages whose own work reads it, ascending, without home
    # Per stage.
    working_nbytes: tuple[int, ...]  # bytes besides the items; negative if items share buffers
    own_ticks: tuple[int, ...]  # the time of its own work
    budget_bytes: int  # the most device bytes at any time

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.working_nbytes)

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage computes first."""
        return _inverse(((stage,) for stage in self.home), self.count)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Items that each stage's own work reads."""
        return _inverse(self.uses, self.count)

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """Items computed from each item."""
        return _inverse(self.inputs, len(self.nbytes))

    @cached_property
    def least_nbytes(self) -> tuple[int, ...]:
        """Per stage, the working set of its own work, a lower bound for every plan."""
        size = self.nbytes
        return tuple(
            working + sum(size[item] for item in writes) + sum(size[item] for item in read)
            for working, writes, read in zip(
                self.working_nbytes, self.writes, self.reads, strict=True
            )
        )

    @cached_property
    def last_need(self) -> tuple[int, ...]:
        """Last stage at which each item can be needed, under any recomputations."""
        last = [max((home, *uses)) for home, uses in zip(self.home, self.uses, strict=True)]
        for item in reversed(range(len(last))):
            for dependent in self.dependents[item]:
                if self.ticks[dependent] is not None:
                    last[item] = max(last[item], last[dependent])
        return tuple(last)

    def refine(self, runs: int) -> Stages:
        """The same problem with `runs - 1` empty stages before each stage.

        So the recomputations before a stage may take `runs` ascending runs through the items. Stage
        `t` becomes `t * runs + runs - 1`.
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
    """For each of `count` numbers, the positions of the lists that contain it."""
    positions: list[list[int]] = [[] for _ in range(count)]
    for position, numbers in enumerate(lists):
        for number in numbers:
            positions[number].append(position)
    return tuple(map(tuple, positions))


def stages_of_nodes(
    nbytes: Sequence[int], ticks: Sequence[int], inputs: Sequence[Iterable[int]], budget_bytes: int
) -> Stages:
    """Each node as a stage of its own, in the given order; every node may be recomputed."""
    count, sources = len(nbytes), tuple(tuple(sorted(set(numbers))) for numbers in inputs)
    items = tuple(nbytes), tuple(ticks), sources, tuple(range(count)), _inverse(sources, count)
    return Stages(
        *items, working_nbytes=(0,) * count, own_ticks=tuple(ticks), budget_bytes=budget_bytes
    )


@dataclass(frozen=True)
class Replay:
    """What happens when the stages run with a set of recomputations."""

    steps: tuple[tuple[int, int], ...]  # (stage, item) in order; item -1: the stage's own work
    step_nbytes: tuple[int, ...]  # device bytes at each step
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per item: first and last stage of each copy

    @property
    def peak_nbytes(self) -> int:
        return max(self.step_nbytes, default=0)


def replay(stages: Stages, recomputed: Iterable[Recomputation]) -> Replay:
    """Run the stages; each copy is live until its last need before the next copy."""
    due: list[list[int]] = [[] for _ in range(stages.count)]
    for item, stage in recomputed:
        due[stage].append(item)
    steps: list[tuple[int, int]] = []
    first_steps: list[int] = []  # per copy: step, item, last step that needs it
    items: list[int] = []
    last_steps: list[int] = []
    current = [-1] * len(stages.nbytes)
    for stage in range(stages.count):
        again = [(item, stages.inputs[item], (item,)) for item in sorted(due[stage])]
        for label, reads, writes in (*again, (-1, stages.reads[stage], stages.writes[stage])):
            index = len(steps)
            for item in reads:
                last_steps[current[item]] = index
            for item in writes:
                current[item] = len(items)
                first_steps.append(index)
                items.append(item)
                last_steps.append(index)
            steps.append((stage, label))
    change = [0] * (len(steps) + 1)
    spans: list[list[tuple[int, int]]] = [[] for _ in stages.nbytes]
    for first, item, last in zip(first_steps, items, last_steps, strict=True):
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
    """Whether these recomputations keep every step within the budget."""
    return replay(stages, recomputed).peak_nbytes <= stages.budget_bytes


@dataclass(frozen=True)
class Answer:
    """A planner's plan, or why there is none."""

    recomputed: frozenset[Recomputation] | None  # of `Stages.refine(runs)`; None: no plan was found
    extra_ticks: int  # time of the recomputations
    bound_ticks: int  # lower bound on the extra time of every plan
    # Proven among plans with `runs` ascending runs a stage; "unknown": neither a plan nor a proof.
    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    runs: int = 1
    stage: int = -1  # a stage that alone makes the budget infeasible
    stage_nbytes: int = 0  # lower bound on the bytes of that stage
