"""A step with a layout for every array: what the walk of `propagate` finds, and what `lower` and `emit` go by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.parallel.partition.placement import Layout
from memplan.program import compat
from memplan.program.axes import Factors


@dataclass(frozen=True)
class Step:
    """What becomes of one equation.

    Attributes:
      needs: layout of each operand.
      gives: layout of each result as it is made.
      factors, factor: what it is divided along, if anything.
      bodies: of a loop or conditional, assigned likewise.
      gathered: positions of split operands that have to be made whole for want of a rule.
      made_whole: every device makes all of the results; that they are given in parts says how they are best read.
      spread: of a loop without carries, the trips are divided among the devices.
    """

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    factors: Factors | None = None
    factor: int | None = None
    bodies: tuple[Assigned, ...] = ()
    gathered: tuple[int, ...] = ()
    made_whole: bool = False
    spread: bool = False


@dataclass(frozen=True)
class Assigned:
    """A flat jaxpr with a layout for every array.

    Attributes:
      inputs, outputs: layouts.
      steps: one for each equation.
      rests: variables made partial -> the layout that their sum is given, for those that are summed.
    """

    jaxpr: compat.ClosedJaxpr
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    rests: Mapping[Any, Layout]


@dataclass(frozen=True)
class Wanted:
    """What is asked of an output: a layout, or none in particular; may it stay partial?"""

    layout: Layout | None = None
    partial: bool = False


class Gathered(NamedTuple):
    """An equation with an operand that every device has to make whole; whether its work is divided all the same."""

    eqn: compat.JaxprEqn
    operand: Any
    divides: bool


def gathers(found: Assigned) -> Iterator[Gathered]:
    """What has to be gathered, loops included."""
    for eqn, step in zip(found.jaxpr.jaxpr.eqns, found.steps, strict=True):
        for position in step.gathered:
            divides = step.factor is not None or step.needs[position].is_split
            yield Gathered(eqn, eqn.invars[position], divides)
        for body in step.bodies:
            yield from gathers(body)
