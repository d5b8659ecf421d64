"""Did the compiler do what the plan says? Its copies and its recomputations, looked for in the executable.

A copy is found by its direction and its bytes: the compiler gives it no other name. A second run of a matrix product or
convolution is found by the mark that the rewriter leaves on every operation of a segment. Where the compiler merged two
of them into one kernel a mark is lost, but no work: so it is dropped only where FLOPs are missing too. Other work melts
into what reads it and has no instruction of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from memplan.planning.graph import Graph
from memplan.planning.loop import Loop, Residuals, repeated
from memplan.planning.plan import Kind, Plan, copy_of

_MARK = re.compile(r"memplan\.(\d+)\.(\d+)(?=[/\"])")
_WAYS = {Kind.OFFLOAD: "out", Kind.PREFETCH: "in"}

Copies = Mapping[tuple[str, int], int]
"""How often bytes of this number are copied at once, "out" to the host or "in" from it."""


Loops = tuple[tuple[Loop, Residuals | None], ...]


@dataclass(frozen=True)
class Effect:
    """What of a plan is in the executable.

    Attributes:
      copies: planned copies that were found.
      recomputations: planned second and later runs of kernels that were found.
      dropped: what was planned and is not there, in words.
    """

    copies: int
    recomputations: int
    dropped: tuple[str, ...]


def effect(
    plan: Plan, graph: Graph, loops: Loops, hlo: str, copies: Copies, flops: float, plain_flops: Callable[[], float]
) -> Effect:
    """Look for what the plan says.

    Args:
      plan: for `graph`, in whose step `loops` are what they are.
      hlo: optimized text of the executable.
      copies: that the executable makes.
      flops: of its matrix products and convolutions.
      plain_flops: of the unmodified step's executable; asked where a mark is missing.
    """
    found: Counter[str] = Counter()
    dropped: list[str] = []
    repetitions = list(_repetitions(plan, graph, hlo))
    merged = False
    if any(there < planned for _, planned, there in repetitions):
        marked_flops = sum(there * graph.ops[op].flops for op, _, there in repetitions)
        planned_flops = sum(planned * graph.ops[op].flops for op, planned, _ in repetitions)
        again = flops - plain_flops() - _again_in(loops)
        merged = again > (marked_flops + planned_flops) / 2
    findings = [
        ("recomputation", planned, planned if merged else there, f"{graph.ops[op].where} is computed again")
        for op, planned, there in repetitions
    ]
    for kind, planned, there, what in (*_copies(plan, graph, loops, copies), *findings):
        found[kind] += min(planned, there)
        if there < planned:
            dropped.append(f"{what} {there} times instead of {planned}")
    return Effect(found["copy"], found["recomputation"], tuple(dropped))


Finding = tuple[str, int, int, str]
"""Its kind, how often it is planned, how often it is there, and what it does."""


def _copies(plan: Plan, graph: Graph, loops: Loops, copies: Copies) -> Iterator[Finding]:
    left = Counter(copies)
    for way, nbytes, times, name in _planned_copies(plan, graph, loops):
        there = min(left[way, nbytes], times)
        left[way, nbytes] -= there
        yield "copy", times, there, f"{name} is copied {'to' if way == 'out' else 'from'} the host"


def _planned_copies(plan: Plan, graph: Graph, loops: Loops) -> Iterator[tuple[str, int, int, str]]:
    """Direction, bytes, how often, and the name of what is copied."""
    for action in plan.actions:
        if copy := copy_of(action, graph):
            value, direction = copy
            if graph.nbytes(value):
                yield _WAYS[direction], graph.nbytes(value), 1, graph.values[value].name
    for loop, residuals in loops:
        for value in residuals.moved if residuals else ():
            for way in _WAYS.values():
                yield way, loop.body.nbytes(value), loop.trips * loop.runs, loop.body.values[value].name


def _repetitions(plan: Plan, graph: Graph, hlo: str) -> Iterator[tuple[int, int, int]]:
    """Operation, second and later runs that are planned, and those that are marked.

    Without any mark it is nothing that the compiler has an instruction for.
    """
    found: dict[int, set[str]] = defaultdict(set)
    for segment, op in _MARK.findall(hlo):
        found[int(op)].add(segment)
    runs = Counter(action.target for action in plan.actions if action.kind is Kind.COMPUTE)
    for op, times in runs.items():
        if times > 1 and found[op] and graph.ops[op].flops_dtype:
            yield op, times - 1, min(len(found[op]), times) - 1


def _again_in(loops: Loops) -> float:
    """FLOPs of matrix work that backward loops do again."""
    again = 0.0
    for loop, residuals in loops:
        ops = [loop.body.ops[op] for op in repeated(loop, residuals)] if residuals else []
        again += loop.trips * loop.runs * sum(op.flops for op in ops if op.flops_dtype)
    return again
