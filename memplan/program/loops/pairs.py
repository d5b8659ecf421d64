"""Which loops of a flat jaxpr are a pair, by what one stacks for the other; and the pair as planners see it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.planning.loops import Loop, Residuals, recomputed_ops
from memplan.planning.problem import Pin
from memplan.program import compat
from memplan.program.flat import Flat
from memplan.program.pins import pin_of


@dataclass(frozen=True)
class LoopPair:
    """A forward and a backward loop in one flat jaxpr."""

    # forward, backward: indices of their equations
    forward: int
    backward: int
    # result of the forward loop (counted after its carries) that only the backward one reads -> its stack there
    stacks: dict[int, int]
    body: Flat  # of the forward loop
    source: str  # `file:line` of the forward loop, or ''


def loop_pairs(flat: Flat) -> Iterator[LoopPair]:
    """Every backward loop with the forward loop that stacks most for it."""
    made: dict[Any, tuple[int, int]] = {}  # a stack -> its loop, its number among that loop's stacks
    taken: set[int] = set()
    for number, eqn in enumerate(flat.eqns):
        scan = compat.scan_of(eqn)
        if scan is None:
            continue
        consts, carries, stacks = scan.split(eqn.invars)
        found: dict[int, dict[int, int]] = {}
        for position, atom in enumerate(stacks):
            is_alone = atom in made and flat.readers[atom] == {number} and stacks.count(atom) == 1
            if is_alone and atom not in flat.returned:
                forward, stack = made[atom]
                if atom not in consts and atom not in carries and forward not in taken:
                    found.setdefault(forward, {})[stack] = position
        for forward, matches in sorted(found.items(), key=lambda item: -len(item[1]))[:1]:
            source = compat.scan_of(flat.eqns[forward])
            if source is not None and source.trips == scan.trips:
                taken.update((forward, number))
                line = compat.relative(compat.source_of(flat.eqns[forward]))
                yield LoopPair(forward, number, matches, flat.inner(forward, 0), line)
        for stack, var in enumerate(eqn.outvars[scan.carries :]):
            made[var] = (number, stack)


def loop_of(pair: LoopPair, forward: compat.Scan, backward: compat.Scan, runs: int, pins: Sequence[Pin]) -> Loop:
    """The pair as planners see it."""
    flat, graph = pair.body, pair.body.graph
    carried = tuple(range(forward.consts, forward.consts + forward.carries))
    results = [flat.outvars[forward.carries + made] for made in pair.stacks]
    needed = {flat.number_of[atom] for atom in results if compat.is_var(atom)}
    given = frozenset(set(range(len(graph.values))).difference(carried, *(op.outputs for op in graph.ops)))
    turns = forward.reverse != backward.reverse
    loop = Loop(graph, forward.trips, runs, given, frozenset(needed - given), carried, turns, pair.source)
    return replace(loop, pins=_pinned(flat, loop, pins)) if pins else loop


def _pinned(flat: Flat, loop: Loop, pins: Sequence[Pin]) -> Mapping[int, Pin]:
    """The pins of values that the backward body reads, or computes others from."""
    again = recomputed_ops(loop, Residuals(()))
    read = loop.needed.union(*(loop.body.ops[op].inputs for op in again))
    marked = [(eqn, pin) for eqn in flat.eqns if (pin := pin_of(eqn, pins))]
    # of several forms of a value, the last is kept
    before = {(atom, pin) for eqn, pin in marked for atom in eqn.invars if compat.is_var(atom)}
    made = ((var, pin) for eqn, pin in marked for var in eqn.outvars if (var, pin) not in before)
    return {flat.number_of[var]: pin for var, pin in made if flat.number_of.get(var) in read}
