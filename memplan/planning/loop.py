"""A forward loop and the loop that reads what it stacked: plain data.

All trips of a loop are alike, so one choice holds for all of them: a value of the body is stacked, on the device or on
the host, or the backward body recomputes it from what is.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.graph import Graph


@dataclass(frozen=True)
class Loop:
    """A forward loop and the backward loop that reads what it stacked."""

    body: Graph  # of the forward loop
    trips: int  # of either loop
    runs: int  # how often the step runs the loops, where they are inside another
    # values of the body that the backward body has in any case: constants, slices of what comes from outside
    given: frozenset[int]
    needed: frozenset[int]  # values of the body that the backward body reads


@dataclass(frozen=True)
class Residuals:
    """What a forward loop stacks, as ids of values of its body; the backward body recomputes all else."""

    kept: tuple[int, ...]  # on the device
    on_host: tuple[int, ...] = ()  # on the host

    @property
    def stacked(self) -> tuple[int, ...]:
        return tuple(sorted((*self.kept, *self.on_host)))

    @property
    def stacked_on_host(self) -> tuple[bool, ...]:
        """Of each that is stacked: is it on the host?"""
        return tuple(value in self.on_host for value in self.stacked)


def stacked_nbytes(loop: Loop, residuals: Residuals | None) -> int:
    """Bytes of the stacks on the device; None stands for the loop as it is written."""
    kept = loop.needed if residuals is None else residuals.kept
    return loop.trips * sum(map(loop.body.nbytes, kept))


def recomputed_ops(loop: Loop, residuals: Residuals) -> tuple[int, ...]:
    """Ops of the forward body that the backward body recomputes, in order."""
    there = loop.given.union(residuals.stacked)
    found: set[int] = set()
    waiting = list(loop.needed - there)
    while waiting:
        made = loop.body.producer[waiting.pop()]
        if made is not None and made not in found:
            found.add(made)
            waiting += [value for value in loop.body.ops[made].inputs if value not in there]
    return tuple(sorted(found))
