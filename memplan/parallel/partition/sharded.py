"""A step with a placement for every array: what `propagate` finds, and what `emit` goes by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.parallel.partition.placement import Partial, PerDevice, Placement, Replicate, Shard
from memplan.program import compat
from memplan.program.ops import Axes


@dataclass(frozen=True)
class ShardedEqn:
    """How one equation is divided among the devices."""

    operands: tuple[Placement, ...]  # placement that each is read in
    results: tuple[Placement, ...]  # placement that each is made in
    # axes, axis: what it is divided along, if anything
    axes: Axes | None = None
    axis: int | None = None
    bodies: tuple[Sharded, ...] = ()  # of a loop or conditional, sharded likewise
    gathered: tuple[int, ...] = ()  # positions of split operands that have to be made whole for want of a rule
    # every device makes all of the results; that `results` has them split says how they are best read
    replicated: bool = False
    divides_trips: bool = False  # of a loop without carries, the trips are divided among the devices


@dataclass(frozen=True)
class Sharded:
    """A flat jaxpr with a placement for every array."""

    jaxpr: compat.ClosedJaxpr
    # inputs, outputs: placements
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    eqns: tuple[ShardedEqn, ...]  # one for each equation
    # variables made partial, or by each device -> the placement of their sum or mean, where that is needed
    reductions: Mapping[Any, Placement]


@dataclass(frozen=True)
class OutputDemand:
    """What is asked of an output: a placement, or none in particular; may it stay partial?"""

    placement: Placement | None = None
    may_be_partial: bool = False


class Gather(NamedTuple):
    """An equation with an operand that every device has to make whole; whether its work is divided all the same."""

    eqn: compat.JaxprEqn
    operand: Any
    divides: bool


def gathers(sharded: Sharded) -> Iterator[Gather]:
    """What has to be gathered for want of a rule, loops included."""
    for eqn, one in zip(sharded.jaxpr.jaxpr.eqns, sharded.eqns, strict=True):
        for position in one.gathered:
            divides = one.axis is not None or isinstance(one.operands[position], Shard)
            yield Gather(eqn, eqn.invars[position], divides)
        for body in one.bodies:
            yield from gathers(body)


def shard_along(operands: Sequence[Placement], axes: Axes | None, axis: int | None, results: int) -> ShardedEqn:
    """An equation with so many results, divided along a axis, if there is one, whatever its operands are."""
    gathered = []
    needs: list[Placement] = []
    for position, placement in enumerate(operands):
        dim = axes.dim_of(axes.operands[position], axis) if axes and axis is not None else None
        if dim is not None:
            needs.append(Shard(dim))
            continue
        masked = axes is not None and axis in axes.reduced and position in axes.masked
        unsplit = PerDevice() if isinstance(placement, PerDevice) else Replicate()
        needs.append(Partial() if masked else unsplit)
        if isinstance(placement, Shard):
            gathered.append(position)
    if axes is None or axis is None:
        made = PerDevice() if PerDevice() in needs else Replicate()
        return ShardedEqn(tuple(needs), (made,) * results, gathered=tuple(gathered))
    if axis in axes.reduced:
        made = Partial() if axes.reduced[axis] == "sum" else Replicate()
        gives = (made,) * results
    else:
        dims = [axes.dim_of(side, axis) for side in axes.results]
        gives = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    return ShardedEqn(tuple(needs), gives, axes, axis, gathered=tuple(gathered))
