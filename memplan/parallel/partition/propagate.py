"""Propagates placements through the arrays of a step: forward along its equations, and backward from their readers.

Forward, results of split operands are split; a sum over a split dimension is `Partial`, and stays so through linear
equations. Backward, an array gets the split that its readers ask for: a broadcast is then made in parts, and a gradient
that only updates a part of the optimizer's state is scattered instead of summed everywhere.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.parallel.partition.sharded import (
    OutputDemand,
    Partial,
    PerDevice,
    Placement,
    Replicate,
    Shard,
    Sharded,
    ShardedEqn,
    shard_along,
)
from memplan.program import compat, ops
from memplan.program.flat import flatten
from memplan.program.ops import Axes, axes_of

_ROUNDS = 4


@dataclass(frozen=True)
class Demands:
    """Variable -> the split that its readers ask for."""

    unanimous: Mapping[Any, Shard] = field(default_factory=dict)  # all readers
    majority: Mapping[Any, Shard] = field(default_factory=dict)  # most of the readers that ask for a split


def propagate(
    jaxpr: compat.ClosedJaxpr,
    inputs: Sequence[Placement],
    outputs: Sequence[OutputDemand],
    devices: int,
    own_statistics: bool = False,
) -> Sharded:
    """Placements for every variable of a flat jaxpr.

    Args:
      inputs: placements of its inputs; constants are replicated.
      outputs: demands on them.
      devices: how many blocks a split array has.
      own_statistics: a sum over the batch that split arrays depend on (batch norm) is taken by each device over its own
        part of the batch. Not in loops.
    """
    asked, own = Demands(), frozenset[int]()
    found = _Forward(jaxpr, inputs, outputs, devices, asked, own).run()
    for _ in range(_ROUNDS):
        following = demands(found, outputs, devices), per_device(found) if own_statistics else own
        if following == (asked, own):
            break
        asked, own = following
        found = _Forward(jaxpr, inputs, outputs, devices, asked, own).run()
    return found


class _Forward:
    """One forward pass."""

    def __init__(
        self,
        jaxpr: compat.ClosedJaxpr,
        inputs: Sequence[Placement],
        outputs: Sequence[OutputDemand],
        devices: int,
        demands: Demands,  # of the last backward pass
        per_device: frozenset[int],  # numbers of equations that are computed from each device's own estimates
    ):
        self.jaxpr, self.inputs, self.outputs, self.devices = jaxpr, inputs, outputs, devices
        self.demands, self.per_device = demands, per_device
        self.placements: dict[Any, Placement] = {var: Replicate() for var, _ in compat.consts_of(jaxpr)}
        self.reductions: dict[Any, Placement] = {}
        self.readers = Counter(atom for eqn in jaxpr.jaxpr.eqns for atom in eqn.invars if compat.is_var(atom))
        self.readers.update(atom for atom in jaxpr.jaxpr.outvars if compat.is_var(atom))
        self.is_per_device = False  # whether the current equation is in `per_device`
        self.averaged: set[Any] = (
            set()
        )  # variables that `per_device` equations read as `PerDevice`, others as their mean
        self.read_per_device: set[Any] = set()  # variables that `per_device` equations read
        self.other_readers = Counter(filter(compat.is_var, jaxpr.jaxpr.outvars))  # number of readers that are not
        for number, eqn in enumerate(jaxpr.jaxpr.eqns):
            if number in per_device:
                self.read_per_device.update(filter(compat.is_var, eqn.invars))
            else:
                self.other_readers.update(set(filter(compat.is_var, eqn.invars)))

    def run(self) -> Sharded:
        self.define(self.jaxpr.jaxpr.invars, self.inputs)
        eqns = []
        for number, eqn in enumerate(self.jaxpr.jaxpr.eqns):
            self.is_per_device = number in self.per_device
            one = self.shard_again(eqn, self.shard(eqn))
            self.define(eqn.outvars, one.results)
            eqns.append(one)
        outputs = []
        self.is_per_device = False
        for atom, want in zip(self.jaxpr.jaxpr.outvars, self.outputs, strict=True):
            self.average([atom])
            if isinstance(self.placement(atom), Partial) and not want.may_be_partial:
                self.reduce(atom)
            outputs.append(want.placement or self.placement(atom))
        return Sharded(self.jaxpr, tuple(self.inputs), tuple(outputs), tuple(eqns), self.reductions)

    def define(self, made: Sequence[Any], placements: Sequence[Placement]) -> None:
        for var, placement in zip(made, placements, strict=True):
            self.placements[var] = placement
            if isinstance(placement, Partial) and self.readers[var] != 1:
                self.reduce(var)

    def placement(self, atom: Any) -> Placement:
        """As this equation reads it."""
        if not compat.is_var(atom):
            return Replicate()
        return PerDevice() if self.is_per_device and atom in self.averaged else self.placements[atom]

    def average(self, atoms: Sequence[Any]) -> None:
        """Replicate `PerDevice` values by their mean."""
        for atom in atoms:
            if compat.is_var(atom) and isinstance(self.placements[atom], PerDevice):
                self.placements[atom] = self.reductions[atom] = Replicate()
                self.averaged.add(atom)

    def deferrable(self, eqn: compat.JaxprEqn, terms: Sequence[Placement]) -> bool:
        """Whether the mean can be taken after this equation: a linear one that alone reads its `PerDevice` operands."""
        own = [isinstance(one, PerDevice) for one in terms]
        whole = [isinstance(one, Replicate) for one in terms]
        if not any(own) or not all(a or b for a, b in zip(own, whole, strict=True)):
            return False
        readers = [self.other_readers[atom] for atom, mine in zip(eqn.invars, own, strict=True) if mine]
        return max(readers) == 1 and (eqn.primitive.name == "mul" or ops.of(eqn).linear(eqn, own, whole))

    def reduce(self, var: Any) -> None:
        """Sum a partial variable: as most readers demand it, replicated, or each device for itself."""
        if var in self.read_per_device:
            self.placements[var] = PerDevice()
        else:
            self.placements[var] = self.reductions[var] = self.demands.majority.get(var, Replicate())

    def reduce_all(self, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if isinstance(self.placement(atom), Partial):
                self.reduce(atom)

    def shard(self, eqn: compat.JaxprEqn) -> ShardedEqn:
        if eqn.primitive.name == "optimization_barrier":
            placements = tuple(map(self.placement, eqn.invars))
            return ShardedEqn(placements, placements)
        terms = tuple(
            PerDevice() if compat.is_var(atom) and atom in self.averaged else self.placement(atom)
            for atom in eqn.invars
        )
        partial = [isinstance(one, Partial) for one in terms]
        if any(partial) and ops.of(eqn).linear(eqn, partial, [isinstance(one, Replicate | PerDevice) for one in terms]):
            return ShardedEqn(terms, tuple(Partial() for _ in eqn.outvars))
        if not self.is_per_device:
            if self.deferrable(eqn, terms):
                return ShardedEqn(terms, tuple(PerDevice() for _ in eqn.outvars))
            self.average(eqn.invars)
        given = [self.placement(atom) for atom in eqn.invars]
        if compat.control_bodies(eqn):
            if (scan := compat.scan_of(eqn)) is not None:
                return self.scan(eqn, scan, given)
            self.reduce_all(eqn.invars)
            given = [self.placement(atom) for atom in eqn.invars]
            return self.cond(eqn, given) if eqn.primitive.name == "cond" else self.while_loop(eqn, given)
        one = self.divided(eqn, given)
        terms_to_sum = [
            atom
            for atom, placement, need in zip(eqn.invars, given, one.operands, strict=True)
            if isinstance(placement, Partial) and not isinstance(need, Partial)
        ]
        if not terms_to_sum:
            return one
        self.reduce_all(terms_to_sum)
        return self.divided(eqn, [self.placement(atom) for atom in eqn.invars])

    def shard_again(self, eqn: compat.JaxprEqn, one: ShardedEqn) -> ShardedEqn:
        """Results of gathered operands are split again for their readers: each device takes its part of them."""
        if not one.gathered or one.bodies or one.axis is not None or PerDevice() in one.results:
            return one
        gathered = [eqn.invars[position] for position in one.gathered]
        shapes = [compat.aval_of(atom).shape for atom in gathered]
        dims = [made.dim for made in map(self.placement, gathered) if isinstance(made, Shard)]
        batch = {shape[dim] for shape, dim in zip(shapes, dims, strict=True)}
        largest = max(math.prod(shape) for shape in shapes)
        results = tuple(
            _shard_again(compat.aval_of(var).shape, batch, largest, self.devices) if made == Replicate() else made
            for var, made in zip(eqn.outvars, one.results, strict=True)
        )
        return replace(one, results=results, replicated=True)

    def divided(self, eqn: compat.JaxprEqn, given: Sequence[Placement]) -> ShardedEqn:
        axes = axes_of(eqn)
        axis = None if axes is None else self.choose_axis(eqn, given, axes)
        return shard_along(given, axes, axis, len(eqn.outvars))

    def choose_axis(self, eqn: compat.JaxprEqn, given: Sequence[Placement], axes: Axes) -> int | None:
        """The axis that the most bytes of split operands vote for, or the one that all readers of a result demand."""
        votes: Counter[int] = Counter()
        for position, (atom, placement) in enumerate(zip(eqn.invars, given, strict=True)):
            axis = axes.of_operand(position, placement.dim) if isinstance(placement, Shard) else None
            if axis is not None and axes.divisible(axis, eqn, self.devices):
                votes[axis] += compat.nbytes_of(atom.aval)
        if votes:
            return votes.most_common(1)[0][0]
        for var, side in zip(eqn.outvars, axes.results, strict=True):
            demand = self.demands.unanimous.get(var)
            axis = side[demand.dim] if demand else None
            if axis is not None and axes.divisible(axis, eqn, self.devices):
                return axis
        return None

    def scan(self, eqn: compat.JaxprEqn, scan: compat.Scan, given: Sequence[Placement]) -> ShardedEqn:
        """Carries keep one placement, found by repetition; a partial carry is summed once, after the loop."""
        const_vars, carry_vars, stack_vars = scan.split(eqn.invars)
        self.reduce_all([*const_vars, *stack_vars])
        consts, carries, stacks = scan.split([self.placement(atom) for atom in eqn.invars])
        first = len(eqn.invars) - len(stacks)
        whole = [first + number for number, placement in enumerate(stacks) if placement == Shard(0)]
        body = flatten(scan.body)
        alone = not scan.carries and not body.jaxpr.effects  # no trip depends on another, as in `lax.map`
        if whole and alone and scan.trips % self.devices == 0 and all(one == Replicate() for one in consts):
            inputs, gives = [Replicate()] * len(body.jaxpr.invars), [Shard(0)] * len(body.jaxpr.outvars)
            found = propagate(body, inputs, [OutputDemand(Replicate())] * len(gives), self.devices)
            needs = (*inputs[: scan.consts], *[Shard(0)] * (len(inputs) - scan.consts))
            return ShardedEqn(needs, tuple(gives), bodies=(found,), divides_trips=True)
        slices = [
            _slice_placement(placement, compat.aval_of(var).shape, self.devices)
            for placement, var in zip(stacks, stack_vars, strict=True)
        ]
        summed = [True] * scan.carries  # carries that may be partial: only where no trip needs their sum
        others = [OutputDemand(may_be_partial=True)] * (len(body.jaxpr.outvars) - scan.carries)
        for _ in range(_ROUNDS):
            wanted = [*(OutputDemand(may_be_partial=may) for may in summed), *others]
            found = propagate(body, [*consts, *carries, *slices], wanted, self.devices)
            inside = scan.split(body.jaxpr.invars)[1]
            summed = [may and var not in found.reductions for may, var in zip(summed, inside, strict=True)]
            met = [_meet(a, b) for a, b in zip(carries, found.outputs, strict=False)]
            met = [Replicate() if one == Partial() and not may else one for one, may in zip(met, summed, strict=True)]
            if met == carries:
                break
            carries = met
        else:
            carries = [Replicate()] * scan.carries
        wanted = [*(OutputDemand(placement, isinstance(placement, Partial)) for placement in carries), *others]
        found = propagate(body, [*consts, *carries, *slices], wanted, self.devices)
        self.reduce_all([atom for atom, one in zip(carry_vars, carries, strict=True) if not isinstance(one, Partial)])
        needs = (*consts, *carries, *map(_stack_placement, slices))
        gives = (*carries, *map(_stack_placement, found.outputs[scan.carries :]))
        return ShardedEqn(needs, gives, bodies=(found,), gathered=tuple(whole))

    def while_loop(self, eqn: compat.JaxprEqn, given: Sequence[Placement]) -> ShardedEqn:
        """The condition is replicated; carries keep one placement, found by repetition."""
        test_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        tests, consts = [Replicate()] * test_consts, list(given[test_consts : test_consts + body_consts])
        carries = list(given[test_consts + body_consts :])
        test, body = (flatten(one) for one in compat.control_bodies(eqn))
        for _ in range(_ROUNDS):
            after = propagate(body, [*consts, *carries], [OutputDemand()] * len(carries), self.devices).outputs
            met = [_meet(a, b) for a, b in zip(carries, after, strict=True)]
            if met == carries:
                break
            carries = met
        else:
            carries = [Replicate()] * len(carries)
        found = propagate(body, [*consts, *carries], [OutputDemand(placement) for placement in carries], self.devices)
        tested = propagate(test, [*tests, *carries], [OutputDemand(Replicate())], self.devices)
        return ShardedEqn((*tests, *consts, *carries), tuple(carries), bodies=(tested, found))

    def cond(self, eqn: compat.JaxprEqn, given: Sequence[Placement]) -> ShardedEqn:
        branches = [flatten(one) for one in compat.control_bodies(eqn)]
        count = len(eqn.outvars)
        found = [propagate(one, given[1:], [OutputDemand()] * count, self.devices).outputs for one in branches]
        outs = [sides[0] if len(set(sides)) == 1 else Replicate() for sides in zip(*found, strict=True)]
        wanted = [OutputDemand(placement) for placement in outs]
        bodies = tuple(propagate(one, given[1:], wanted, self.devices) for one in branches)
        return ShardedEqn((Replicate(), *given[1:]), tuple(outs), bodies=bodies)


def _shard_again(shape: Sequence[int], batch: Collection[int], largest: int, devices: int) -> Placement:
    """Along a dimension that holds the whole batch; else, if it is as large as an operand, along its largest."""
    whole = [dim for dim, size in enumerate(shape) if size and any(size % one == 0 for one in batch)]
    if not whole and math.prod(shape) >= largest:
        whole = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    return next((Shard(dim) for dim in whole if shape[dim] % devices == 0), Replicate())


def _slice_placement(placement: Placement, shape: Sequence[int], devices: int) -> Placement:
    """Placement of a stack's slices: the scanned dimension cannot be split, so another one is."""
    if not isinstance(placement, Shard):
        return placement
    if placement.dim:
        return Shard(placement.dim - 1)
    return next((Shard(dim) for dim, size in enumerate(shape[1:]) if size and size % devices == 0), Replicate())


def _stack_placement(placement: Placement) -> Placement:
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _meet(before: Placement, after: Placement) -> Placement:
    """One placement for a carry before and after a trip."""
    if before == after or before != Replicate():
        return before if before == after or not isinstance(after, Shard) else Replicate()
    return after


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
