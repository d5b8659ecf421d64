"""The backward pass: the placement that the readers of every array ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.parallel.partition.sharded import OutputDemand, Placement, Shard, Sharded, ShardedEqn, shard_along
from memplan.program import compat
from memplan.program.axis_rules import axes_of


@dataclass(frozen=True)
class Demands:
    """Variable -> the split that its readers ask for."""

    unanimous: Mapping[Any, Shard] = field(default_factory=dict)  # all readers
    majority: Mapping[Any, Shard] = field(default_factory=dict)  # most of the readers that ask for a split


def demands(sharded: Sharded, outputs: Sequence[OutputDemand], devices: int) -> Demands:
    """What readers ask for; an equation that is not divided passes on the demand on its result."""
    asked: dict[Any, list[Placement]] = {}

    def ask(atoms: Sequence[Any], placements: Sequence[Placement]) -> None:
        for atom, placement in zip(atoms, placements, strict=True):
            if compat.is_var(atom):
                asked.setdefault(atom, []).append(placement)

    jaxpr = sharded.jaxpr.jaxpr
    ask(jaxpr.outvars, [want.placement or made for want, made in zip(outputs, sharded.outputs, strict=True)])
    for eqn, one in zip(reversed(jaxpr.eqns), reversed(sharded.eqns), strict=True):
        passes_on = one.axis is None and not one.bodies
        ask(eqn.invars, _passed_on(eqn, one, asked, devices) if passes_on else one.operands)
    unanimous = {var: shard for var, placements in asked.items() if (shard := _common(placements))}
    shards = {var: [one for one in placements if isinstance(one, Shard)] for var, placements in asked.items()}
    return Demands(unanimous, {var: Counter(known).most_common(1)[0][0] for var, known in shards.items() if known})


def per_device(sharded: Sharded) -> frozenset[int]:
    """Numbers of equations through which split results depend on unsplit ones: statistics of the batch."""
    onward: set[Any] = set()
    numbers: set[int] = set()
    for number in reversed(range(len(sharded.eqns))):
        eqn, one = sharded.jaxpr.jaxpr.eqns[number], sharded.eqns[number]
        unsplit = [var for var, made in zip(eqn.outvars, one.results, strict=True) if not isinstance(made, Shard)]
        if one.bodies or (len(unsplit) == len(eqn.outvars) and onward.isdisjoint(unsplit)):
            continue
        numbers.add(number)
        read = zip(eqn.invars, one.operands, strict=True)
        onward.update(atom for atom, need in read if compat.is_var(atom) and not isinstance(need, Shard))
    return frozenset(numbers)


def _passed_on(
    eqn: compat.JaxprEqn, one: ShardedEqn, asked: Mapping[Any, Sequence[Placement]], devices: int
) -> Sequence[Placement]:
    axes = axes_of(eqn)
    for var, side in zip(eqn.outvars, axes.results if axes else (), strict=False):
        shard = _common(asked.get(var, ()))
        axis = side[shard.dim] if shard else None
        if axes and axis is not None and axes.divisible(axis, eqn, devices):
            return shard_along(one.operands, axes, axis, len(eqn.outvars)).operands
    return one.operands


def _common(placements: Sequence[Placement]) -> Shard | None:
    """The shard that all of these equal, if any."""
    first = placements[0] if placements else None
    return first if isinstance(first, Shard) and len(set(placements)) == 1 else None
