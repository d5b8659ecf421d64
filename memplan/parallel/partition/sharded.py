"""How the arrays of a step are placed on the devices of a mesh; placements are named as in PyTorch's DTensor.

`propagate` makes a `Sharded`, `emit` writes the step that one device runs from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.program import compat
from memplan.program.ops import Axes


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device has all of it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device has a term of its sum."""


@dataclass(frozen=True, slots=True)
class PerDevice:
    """Every device has an estimate of it from its own part of the batch; their mean stands for it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along `dim`; the blocks follow the devices in the order of the mesh, outermost axis first."""

    dim: int


Placement = Replicate | Partial | PerDevice | Shard


@dataclass(frozen=True)
class ShardedEqn:
    """How one equation is divided among the devices."""

    operands: tuple[Placement, ...]  # in which each is read
    results: tuple[Placement, ...]  # in which each is made
    axes: Axes | None = None
    axis: int | None = None  # number in `axes` of the axis that it is divided along, if any
    bodies: tuple[Sharded, ...] = ()  # of a loop or conditional
    gathered: tuple[int, ...] = ()  # positions of split operands that are gathered, since no rule divides them
    replicated: bool = False  # every device makes all results; where `results` are split, readers take their part
    divides_trips: bool = False  # the devices divide the trips of a loop without carries


@dataclass(frozen=True)
class Sharded:
    """A flat jaxpr with a placement for every array."""

    jaxpr: compat.ClosedJaxpr
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    eqns: tuple[ShardedEqn, ...]  # one for each equation
    reductions: Mapping[Any, Placement]  # variables that are `Partial` or `PerDevice` -> placement of their sum or mean


@dataclass(frozen=True)
class OutputDemand:
    """The placement that an output must have."""

    placement: Placement | None = None  # None: any
    may_be_partial: bool = False


class Gather(NamedTuple):
    """An equation with an operand that every device gathers."""

    eqn: compat.JaxprEqn
    operand: Any
    divides: bool  # whether its work is divided all the same


def gathers(sharded: Sharded) -> Iterator[Gather]:
    """All operands that are gathered since no rule divides them, in loops too."""
    for eqn, one in zip(sharded.jaxpr.jaxpr.eqns, sharded.eqns, strict=True):
        for position in one.gathered:
            divides = one.axis is not None or isinstance(one.operands[position], Shard)
            yield Gather(eqn, eqn.invars[position], divides)
        for body in one.bodies:
            yield from gathers(body)


def shard_along(operands: Sequence[Placement], axes: Axes | None, axis: int | None, results: int) -> ShardedEqn:
    """Divide an equation along an axis, if one is given, whatever the placements of its operands."""
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
