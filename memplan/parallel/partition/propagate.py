"""Which layout every array of a step gets, before anything is written: a walk over its equations, and back.

Forward, what is split makes what depends on it split; a sum over what is split is *partial*, and stays so through what
is linear. Backward, who reads an array split would have liked it to be made so: that is how a broadcast is made in its
parts, and how a gradient that only updates a part of the optimizer's state is scattered instead of summed everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.parallel.partition.assigned import Assigned, Step, Wanted
from memplan.parallel.partition.placement import OWN, PARTIAL, WHOLE, Layout, split
from memplan.program import compat
from memplan.program.axes import Factors, factors_of, is_linear
from memplan.program.trace import flatten

_ROUNDS = 4


def assign(
    jaxpr: compat.ClosedJaxpr,
    inputs: Sequence[Layout],
    wanted: Sequence[Wanted],
    devices: int,
    own_statistics: bool = False,
) -> Assigned:
    """Layouts for every variable of a flat jaxpr.

    Args:
      inputs: layouts of its inputs, constants left out: those are whole.
      wanted: of its outputs.
      devices: how many blocks a split array has.
      own_statistics: a sum over the batch that goes back into what is split (batch norm) is each device's own, over its
        part of the batch. Not in loops.
    """
    wishes, feeding = _Wishes(), frozenset[int]()
    found = _Walk(jaxpr, inputs, wanted, devices, wishes, feeding).run()
    for _ in range(_ROUNDS):
        following = _wishes(found, wanted, devices), _feeding(found) if own_statistics else feeding
        if following == (wishes, feeding):
            break
        wishes, feeding = following
        found = _Walk(jaxpr, inputs, wanted, devices, wishes, feeding).run()
    return found


def _feeding(found: Assigned) -> frozenset[int]:
    """Equations through which what is not split gets into what is."""
    onward: set[Any] = set()
    numbers: set[int] = set()
    for number in reversed(range(len(found.steps))):
        eqn, step = found.jaxpr.jaxpr.eqns[number], found.steps[number]
        others = [var for var, layout in zip(eqn.outvars, step.gives, strict=True) if not layout.is_split]
        if step.bodies or (len(others) == len(eqn.outvars) and onward.isdisjoint(others)):
            continue
        numbers.add(number)
        onward.update(
            atom for atom, need in zip(eqn.invars, step.needs, strict=True) if compat.is_var(atom) and not need.is_split
        )
    return frozenset(numbers)


@dataclass(frozen=True)
class _Wishes:
    """Variables -> the split layout that all their readers (`common`), or most of them (`any`), ask for."""

    common: Mapping[Any, Layout] = field(default_factory=dict)
    any: Mapping[Any, Layout] = field(default_factory=dict)


class _Walk:
    """The way forward."""

    def __init__(
        self,
        jaxpr: compat.ClosedJaxpr,
        inputs: Sequence[Layout],
        wanted: Sequence[Wanted],
        devices: int,
        wishes: _Wishes,
        feeding: frozenset[int],
    ):
        self.feeding = feeding
        self.jaxpr, self.inputs, self.wanted, self.devices, self.wishes = jaxpr, inputs, wanted, devices, wishes
        self.layouts: dict[Any, Layout] = {var: WHOLE for var, _ in compat.consts_of(jaxpr)}
        self.rests: dict[Any, Layout] = {}
        self.readers = Counter(atom for eqn in jaxpr.jaxpr.eqns for atom in eqn.invars if compat.is_var(atom))
        self.readers.update(atom for atom in jaxpr.jaxpr.outvars if compat.is_var(atom))
        self.feeds = False  # the equation at hand is one of `feeding`
        self.agreed: set[Any] = set()  # each device's own for those, whole for others
        self.fed: set[Any] = set()  # read by equations that are
        self.settled_readers = Counter(filter(compat.is_var, jaxpr.jaxpr.outvars))  # number of the others
        for number, eqn in enumerate(jaxpr.jaxpr.eqns):
            if number in feeding:
                self.fed.update(filter(compat.is_var, eqn.invars))
            else:
                self.settled_readers.update(set(filter(compat.is_var, eqn.invars)))

    def run(self) -> Assigned:
        self.make(self.jaxpr.jaxpr.invars, self.inputs)
        steps = []
        for number, eqn in enumerate(self.jaxpr.jaxpr.eqns):
            self.feeds = number in self.feeding
            step = self.read_in_parts(eqn, self.step(eqn))
            self.make(eqn.outvars, step.gives)
            steps.append(step)
        outputs = []
        for atom, want in zip(self.jaxpr.jaxpr.outvars, self.wanted, strict=True):
            self.feeds = False
            self.agree([atom])
            if self.layout(atom).is_partial and not want.partial:
                self.settle(atom)
            outputs.append(want.layout or self.layout(atom))
        return Assigned(self.jaxpr, tuple(self.inputs), tuple(outputs), tuple(steps), self.rests)

    def make(self, made: Sequence[Any], layouts: Sequence[Layout]) -> None:
        for var, layout in zip(made, layouts, strict=True):
            self.layouts[var] = layout
            if layout.is_partial and self.readers[var] != 1:
                self.settle(var)

    def layout(self, atom: Any) -> Layout:
        """As this equation reads it."""
        if not compat.is_var(atom):
            return WHOLE
        return OWN if self.feeds and atom in self.agreed else self.layouts[atom]

    def agree(self, atoms: Sequence[Any]) -> None:
        """What is each device's own is needed alike everywhere: the mean of all."""
        for atom in atoms:
            if compat.is_var(atom) and self.layouts[atom].is_own:
                self.layouts[atom] = self.rests[atom] = WHOLE
                self.agreed.add(atom)

    def may_wait(self, eqn: compat.JaxprEqn, terms: Sequence[Layout]) -> bool:
        """Devices need not agree before a product or what is linear, if nothing else reads what is their own."""
        own = [layout.is_own for layout in terms]
        whole = [layout == WHOLE for layout in terms]
        if not any(own) or not all(a or b for a, b in zip(own, whole, strict=True)):
            return False
        readers = [self.settled_readers[atom] for atom, mine in zip(eqn.invars, own, strict=True) if mine]
        return max(readers) == 1 and (eqn.primitive.name == "mul" or is_linear(eqn, own, whole))

    def settle(self, var: Any) -> None:
        """Its sum is needed: everywhere, in parts where a reader would have it so, or as each device estimates it."""
        if var in self.fed:
            self.layouts[var] = OWN
        else:
            self.layouts[var] = self.rests[var] = self.wishes.any.get(var, WHOLE)

    def step(self, eqn: compat.JaxprEqn) -> Step:
        if eqn.primitive.name == "optimization_barrier":
            layouts = tuple(map(self.layout, eqn.invars))
            return Step(layouts, layouts)
        terms = tuple(OWN if compat.is_var(atom) and atom in self.agreed else self.layout(atom) for atom in eqn.invars)
        partial = [layout.is_partial for layout in terms]
        if any(partial) and is_linear(eqn, partial, [layout in (WHOLE, OWN) for layout in terms]):
            return Step(terms, tuple(PARTIAL for _ in eqn.outvars))
        if not self.feeds:
            if self.may_wait(eqn, terms):
                return Step(terms, tuple(OWN for _ in eqn.outvars))
            self.agree(eqn.invars)
        given = [self.layout(atom) for atom in eqn.invars]
        if compat.control_bodies(eqn):
            return self.control(eqn, given)
        step = self.divided(eqn, given)
        unsettled = [
            atom
            for atom, layout, need in zip(eqn.invars, given, step.needs, strict=True)
            if layout.is_partial and not need.is_partial
        ]
        if not unsettled:
            return step
        self.settle_all(unsettled)
        return self.divided(eqn, [self.layout(atom) for atom in eqn.invars])

    def read_in_parts(self, eqn: compat.JaxprEqn, step: Step) -> Step:
        """What is made from gathered operands is divided again by whoever reads it: a device has its part already."""
        if not step.gathered or step.bodies or OWN in step.gives:
            return step
        shapes = [compat.aval_of(eqn.invars[position]).shape for position in step.gathered]
        dims = [self.layout(eqn.invars[position]).dim for position in step.gathered]
        batch = {shape[dim] for shape, dim in zip(shapes, dims, strict=True)}
        largest = max(math.prod(shape) for shape in shapes)
        gives = tuple(
            _parts_again(compat.aval_of(var).shape, batch, largest, self.devices) if layout.is_whole else layout
            for var, layout in zip(eqn.outvars, step.gives, strict=True)
        )
        return replace(step, gives=gives, made_whole=True) if step.factor is None else step

    def divided(self, eqn: compat.JaxprEqn, given: Sequence[Layout]) -> Step:
        factors = factors_of(eqn)
        return _divided(given, factors, self.chosen(eqn, given, factors), len(eqn.outvars))

    def settle_all(self, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if self.layout(atom).is_partial:
                self.settle(atom)

    def chosen(self, eqn: compat.JaxprEqn, given: Sequence[Layout], factors: Factors | None) -> int | None:
        """The factor that the most bytes of split operands vote for, or the one that all readers of a result wish."""
        if factors is None:
            return None
        votes: Counter[int] = Counter()
        for position, (atom, layout) in enumerate(zip(eqn.invars, given, strict=True)):
            factor = factors.of_operand(position, layout.dim) if layout.is_split else None
            if factor is not None and factors.divisible(factor, eqn, self.devices):
                votes[factor] += compat.nbytes_of(atom.aval)
        if votes:
            return votes.most_common(1)[0][0]
        for var, side in zip(eqn.outvars, factors.results, strict=True):
            wish = self.wishes.common.get(var)
            factor = side[wish.dim] if wish else None
            if factor is not None and factors.divisible(factor, eqn, self.devices):
                return factor
        return None

    def control(self, eqn: compat.JaxprEqn, given: Sequence[Layout]) -> Step:
        scan = compat.scan_of(eqn)
        if scan is not None:
            return self.scan(eqn, scan, given)
        self.settle_all(eqn.invars)
        given = [self.layout(atom) for atom in eqn.invars]
        return self.cond(eqn, given) if eqn.primitive.name == "cond" else self.loop(eqn, given)

    def scan(self, eqn: compat.JaxprEqn, scan: compat.Scan, given: Sequence[Layout]) -> Step:
        """Carries keep one layout: of what goes in, unless what comes out is split, or partial: that is summed once."""
        const_vars, carry_vars, stack_vars = scan.split(eqn.invars)
        self.settle_all([*const_vars, *stack_vars])
        consts, carries, stacks = scan.split([self.layout(atom) for atom in eqn.invars])
        first = len(eqn.invars) - len(stacks)
        whole = [first + number for number, layout in enumerate(stacks) if layout.is_split and layout.dim == 0]
        body = flatten(scan.body)
        if whole and self.may_spread(scan, body, consts):
            return self.spread(scan, body)
        slices = [
            _within(layout, compat.aval_of(var).shape, self.devices)
            for layout, var in zip(stacks, stack_vars, strict=True)
        ]
        summed = [True] * scan.carries  # carries that may be partial: only where no trip needs their sum
        others = [Wanted(partial=True)] * (len(body.jaxpr.outvars) - scan.carries)
        for _ in range(_ROUNDS):
            wanted = [*(Wanted(partial=may) for may in summed), *others]
            found = assign(body, [*consts, *carries, *slices], wanted, self.devices)
            inside = scan.split(body.jaxpr.invars)[1]
            summed = [may and var not in found.rests for may, var in zip(summed, inside, strict=True)]
            met = [_meet(a, b) for a, b in zip(carries, found.outputs, strict=False)]
            met = [WHOLE if one.is_partial and not may else one for one, may in zip(met, summed, strict=True)]
            if met == carries:
                break
            carries = met
        else:
            carries = [WHOLE] * scan.carries
        wanted = [*(Wanted(layout, layout.is_partial) for layout in carries), *others]
        found = assign(body, [*consts, *carries, *slices], wanted, self.devices)
        self.settle_all([atom for atom, one in zip(carry_vars, carries, strict=True) if not one.is_partial])
        needs = (*consts, *carries, *map(_around, slices))
        gives = (*carries, *map(_around, found.outputs[scan.carries :]))
        return Step(needs, gives, bodies=(found,), gathered=tuple(whole))

    def may_spread(self, scan: compat.Scan, body: compat.ClosedJaxpr, consts: Sequence[Layout]) -> bool:
        """Trips that know nothing of one another (`lax.map`) are as good on different devices."""
        alone = not scan.carries and not body.jaxpr.effects
        return alone and scan.trips % self.devices == 0 and all(layout.is_whole for layout in consts)

    def spread(self, scan: compat.Scan, body: compat.ClosedJaxpr) -> Step:
        inputs = [WHOLE] * len(body.jaxpr.invars)
        found = assign(body, inputs, [Wanted(WHOLE)] * len(body.jaxpr.outvars), self.devices)
        stacks = [split(0)] * (len(inputs) - scan.consts)
        gives = [split(0)] * len(body.jaxpr.outvars)
        return Step((*inputs[: scan.consts], *stacks), tuple(gives), bodies=(found,), spread=True)

    def loop(self, eqn: compat.JaxprEqn, given: Sequence[Layout]) -> Step:
        """A `while`: what decides whether it goes on is whole, carries keep one layout."""
        test_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        tests, consts = [WHOLE] * test_consts, list(given[test_consts : test_consts + body_consts])
        carries = list(given[test_consts + body_consts :])
        test, body = (flatten(one) for one in compat.control_bodies(eqn))
        for _ in range(_ROUNDS):
            after = assign(body, [*consts, *carries], [Wanted()] * len(carries), self.devices).outputs
            met = [_meet(a, b) for a, b in zip(carries, after, strict=True)]
            if met == carries:
                break
            carries = met
        else:
            carries = [WHOLE] * len(carries)
        found = assign(body, [*consts, *carries], [Wanted(layout) for layout in carries], self.devices)
        tested = assign(test, [*tests, *carries], [Wanted(WHOLE)], self.devices)
        return Step((*tests, *consts, *carries), tuple(carries), bodies=(tested, found))

    def cond(self, eqn: compat.JaxprEqn, given: Sequence[Layout]) -> Step:
        branches = [flatten(one) for one in compat.control_bodies(eqn)]
        count = len(eqn.outvars)
        found = [assign(one, given[1:], [Wanted()] * count, self.devices).outputs for one in branches]
        outs = [sides[0] if len(set(sides)) == 1 else WHOLE for sides in zip(*found, strict=True)]
        wanted = [Wanted(layout) for layout in outs]
        bodies = tuple(assign(one, given[1:], wanted, self.devices) for one in branches)
        return Step((WHOLE, *given[1:]), tuple(outs), bodies=bodies)


def _divided(given: Sequence[Layout], factors: Factors | None, factor: int | None, results: int) -> Step:
    gathered = []
    needs: list[Layout] = []
    for position, layout in enumerate(given):
        dim = factors.dim_of(factors.operands[position], factor) if factors and factor is not None else None
        if dim is not None:
            needs.append(split(dim))
            continue
        masked = factors is not None and factor in factors.reduced and position in factors.masked
        needs.append(PARTIAL if masked else OWN if layout.is_own else WHOLE)
        if layout.is_split:
            gathered.append(position)
    if factors is None or factor is None:
        made = OWN if OWN in needs else WHOLE
        return Step(tuple(needs), (made,) * results, gathered=tuple(gathered))
    if factor in factors.reduced:
        made = PARTIAL if factors.reduced[factor] == "sum" else WHOLE
        gives = (made,) * results
    else:
        dims = [factors.dim_of(side, factor) for side in factors.results]
        gives = tuple(WHOLE if dim is None else split(dim) for dim in dims)
    return Step(tuple(needs), gives, factors, factor, gathered=tuple(gathered))


def _parts_again(shape: Sequence[int], batch: Collection[int], largest: int, devices: int) -> Layout:
    """Along a dimension that has the whole batch in it, or of what is as large as an operand along its largest."""
    whole = [dim for dim, size in enumerate(shape) if size and any(size % one == 0 for one in batch)]
    if not whole and math.prod(shape) >= largest:
        whole = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    return next((split(dim) for dim in whole if shape[dim] % devices == 0), WHOLE)


def _within(layout: Layout, shape: Sequence[int], devices: int) -> Layout:
    """Of a stack, the layout of its slices: the dimension that is scanned over cannot be split, another perhaps can."""
    if not layout.is_split:
        return layout
    if layout.dim:
        return split(layout.dim - 1)
    return next((split(dim) for dim, size in enumerate(shape[1:]) if size and size % devices == 0), WHOLE)


def _around(layout: Layout) -> Layout:
    return split(layout.dim + 1) if layout.is_split else layout


def _meet(before: Layout, after: Layout) -> Layout:
    """One layout for what goes into a trip and what comes out of it."""
    if before == after or before != WHOLE:
        return before if before == after or not after.is_split else WHOLE
    return after


def _wishes(found: Assigned, wanted: Sequence[Wanted], devices: int) -> _Wishes:
    """The way back: what readers ask for; an equation that nobody divided passes on what it is asked."""
    asked: dict[Any, list[Layout]] = {}

    def ask(atoms: Sequence[Any], layouts: Sequence[Layout]) -> None:
        for atom, layout in zip(atoms, layouts, strict=True):
            if compat.is_var(atom):
                asked.setdefault(atom, []).append(layout)

    ask(found.jaxpr.jaxpr.outvars, [want.layout or layout for want, layout in zip(wanted, found.outputs, strict=True)])
    for eqn, step in zip(reversed(found.jaxpr.jaxpr.eqns), reversed(found.steps), strict=True):
        if step.factor is None and not step.bodies:
            ask(eqn.invars, _passed_on(eqn, step, asked, devices))
        else:
            ask(eqn.invars, step.needs)
    common = {var: layouts[0] for var, layouts in asked.items() if len(set(layouts)) == 1 and layouts[0].is_split}
    splits = {var: [layout for layout in layouts if layout.is_split] for var, layouts in asked.items()}
    return _Wishes(common, {var: Counter(known).most_common(1)[0][0] for var, known in splits.items() if known})


def _passed_on(
    eqn: compat.JaxprEqn, step: Step, asked: Mapping[Any, Sequence[Layout]], devices: int
) -> Sequence[Layout]:
    factors = factors_of(eqn)
    for var, side in zip(eqn.outvars, factors.results if factors else (), strict=False):
        layouts = asked.get(var, ())
        alike = layouts and layouts[0].is_split and len(set(layouts)) == 1
        factor = side[layouts[0].dim] if alike else None
        if factors and factor is not None and factors.divisible(factor, eqn, devices):
            return _divided(step.needs, factors, factor, len(eqn.outvars)).needs
    return step.needs
