"""Find pairs of loops, one of which stacks values for the other; a pair as planners see it."""

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

    forward: int  # number of the forward loop's equation
    backward: int  # number of the backward loop's equation
    # number of a stack that the forward loop makes for the backward loop alone -> number of the
    # stack that the backward loop reads
    stacks: dict[int, int]
    body: Flat  # of the forward loop
    source: str  # `file:line` of the forward loop, or ''


def loop_pairs(flat: Flat) -> Iterator[LoopPair]:
    """Yield every backward loop with the forward loop that stacks most values for it."""
    # stack -> the equation that makes it, its number among that equation's stacks
    stack_sources: dict[Any, tuple[int, int]] = {}
    paired: set[int] = set()
    for number, eqn in enumerate(flat.eqns):
        scan = compat.scan_of(eqn)
        if scan is None:
            continue
        consts, carries, stacks = scan.split(eqn.invars)
        matches_by_loop: dict[int, dict[int, int]] = {}
        for position, atom in enumerate(stacks):
            if atom not in stack_sources or atom in flat.returned:
                continue
            forward, stack = stack_sources[atom]
            is_read_once = flat.readers[atom] == {number} and stacks.count(atom) == 1
            is_only_sliced = atom not in consts and atom not in carries
            if is_read_once and is_only_sliced and forward not in paired:
                matches_by_loop.setdefault(forward, {})[stack] = position
        if matches_by_loop:
            forward, matches = max(matches_by_loop.items(), key=lambda item: len(item[1]))
            forward_scan = compat.scan_of(flat.eqns[forward])
            if forward_scan is not None and forward_scan.trips == scan.trips:
                paired.update((forward, number))
                source = compat.relative(compat.source_of(flat.eqns[forward]))
                yield LoopPair(forward, number, matches, flat.inner(forward, 0), source)
        for stack, var in enumerate(eqn.outvars[scan.carries :]):
            stack_sources[var] = (number, stack)


def loop_of(
    pair: LoopPair,
    forward: compat.Scan,
    backward: compat.Scan,
    runs: int,
    pins: Sequence[Pin],
) -> Loop:
    """The pair as planners see it.

    Args:
      runs: how often the step runs the pair, if it is inside a loop.
    """
    flat = pair.body
    graph = flat.graph
    carried = tuple(range(forward.consts, forward.consts + forward.carries))
    results = [flat.outvars[forward.carries + stack] for stack in pair.stacks]
    needed = {flat.number_of[atom] for atom in results if compat.is_var(atom)}
    values = set(range(len(graph.values)))
    always_available = values.difference(carried, *(op.outputs for op in graph.ops))
    loop = Loop(
        body=graph,
        trips=forward.trips,
        runs=runs,
        available=frozenset(always_available),
        needed=frozenset(needed - always_available),
        carried=carried,
        reverses=forward.reverse != backward.reverse,
        source=pair.source,
    )
    return replace(loop, pins=_pinned(flat, loop, pins)) if pins else loop


def _pinned(flat: Flat, loop: Loop, pins: Sequence[Pin]) -> Mapping[int, Pin]:
    """The pins of values that the backward body reads or recomputes from, by value of the body."""
    recomputed = recomputed_ops(loop, Residuals(()))
    read = loop.needed.union(*(loop.body.ops[op].inputs for op in recomputed))
    marked = [(eqn, pin) for eqn in flat.eqns if (pin := pin_of(eqn, pins))]
    # if equations with the same mark read one another, the pin holds for the last one's result
    operands = [(atom, pin) for eqn, pin in marked for atom in eqn.invars]
    earlier_forms = {(atom, pin) for atom, pin in operands if compat.is_var(atom)}
    results = [(var, pin) for eqn, pin in marked for var in eqn.outvars]
    last_forms = [form for form in results if form not in earlier_forms]
    return {flat.number_of[var]: pin for var, pin in last_forms if flat.number_of.get(var) in read}
