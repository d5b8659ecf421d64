"""Loops that belong together: a forward `scan` stacks residuals, a backward one reads them and is their only reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplan.planning.loops import Loop
from memplan.program import compat
from memplan.program.extract import body_graph, readers, variables
from memplan.program.flatten import flatten


@dataclass(frozen=True)
class LoopPair:
    """A forward and a backward loop in one flat jaxpr."""

    # forward, backward: indices of their equations
    forward: int
    backward: int
    # results of the forward loop (counted after its carries) that only the backward one reads, by the number of the
    # stack that the backward loop takes them as
    stacks: dict[int, int]
    body: compat.ClosedJaxpr  # of the forward loop, flat


def loop_pairs(closed: compat.ClosedJaxpr) -> Iterator[LoopPair]:
    """Every backward loop with the forward loop that stacks most for it."""
    eqns = closed.jaxpr.eqns
    read_by, returned = readers(closed), set(filter(compat.is_var, closed.jaxpr.outvars))
    made: dict[Any, tuple[int, int]] = {}  # a stack -> its loop, its number among that loop's stacks
    taken: set[int] = set()
    for number, eqn in enumerate(eqns):
        scan = compat.scan_of(eqn)
        if scan is None:
            continue
        consts, carries, stacks = scan.split(eqn.invars)
        found: dict[int, dict[int, int]] = {}
        for position, atom in enumerate(stacks):
            if atom in made and read_by[atom] == {number} and atom not in returned and stacks.count(atom) == 1:
                forward, stack = made[atom]
                if atom not in consts and atom not in carries and forward not in taken:
                    found.setdefault(forward, {})[stack] = position
        for forward, matches in sorted(found.items(), key=lambda item: -len(item[1]))[:1]:
            source = compat.scan_of(eqns[forward])
            if source is not None and source.trips == scan.trips:
                taken.update((forward, number))
                yield LoopPair(forward, number, matches, flatten(source.body))
        for stack, var in enumerate(eqn.outvars[scan.carries :]):
            made[var] = (number, stack)


def loop_of(pair: LoopPair, forward: compat.Scan, runs: int) -> Loop:
    """The pair as a planner sees it."""
    flat = pair.body
    graph = body_graph(flat)
    carried = range(forward.consts, forward.consts + forward.carries)
    number = {var: value for value, var in enumerate(variables(flat))}
    results = [flat.jaxpr.outvars[forward.carries + made] for made in pair.stacks]
    needed = {number[atom] for atom in results if compat.is_var(atom)}
    given = frozenset(set(range(len(graph.values))).difference(carried, *(op.outputs for op in graph.ops)))
    return Loop(graph, forward.trips, runs, given, frozenset(needed - given))
