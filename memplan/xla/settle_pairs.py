"""A scheduled module -> one whose asynchronous collectives under way hold only a part of a room.

XLA's scheduler starts gathers long before their values are read, and ends other collectives late. Meanwhile nothing of
them can be recomputed: the result of a gather is incomplete, and what the others read is still read. Where pairs hold
much, a gather starts right before its end, and any other collective ends right after its start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.legal import pair_ends
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import runs
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import Module, read_module
from memplan.xla.write import write

_SHARE = 0.5  # of the room; the rest is for kernels and for values that may be recomputed


@dataclass(frozen=True)
class _Pair:
    """A collective, by the numbers of the kernels that start and end it."""

    start: int
    end: int
    gathers: bool
    nbytes: int  # that are free sooner, or taken later, if nothing runs beside it


def settle_pairs(module: Module, problem: Problem, room_nbytes: int) -> Module:
    """The module with some collectives synchronous; itself where pairs hold little.

    Args:
      problem: the module's, by `problem_of`.
    """
    settled = _crowding(problem, _pairs(module, problem), _SHARE * room_nbytes)
    if not settled:
        return module
    return read_module(write(module, problem, runs(_order(problem, settled))), module)


def _pairs(module: Module, problem: Problem) -> Sequence[_Pair]:
    found = []
    for start, end in pair_ends(problem).items():
        kernel = problem.kernels[start]
        opcode = module.instructions[kernel.name].opcode
        if is_collective(opcode):
            gathers = opcode == "all-gather-start"
            written = {problem.buffers[number].alias_set for number in kernel.writes}
            held = kernel.writes if gathers else kernel.reads
            buffers = (problem.buffers[number] for number in held)
            nbytes = (
                one.nbytes
                for one in buffers
                if one.role is Role.TEMPORARY and (gathers or one.alias_set not in written)
            )
            found.append(_Pair(start, end, gathers, sum(nbytes)))
    return found


def _crowding(problem: Problem, pairs: Sequence[_Pair], most_nbytes: float) -> list[_Pair]:
    """The largest of those that hold more together than this, until the others do not."""
    held = np.zeros(len(problem.kernels), np.int64)
    for pair in pairs:
        held[pair.start : pair.end + 1] += pair.nbytes
    found = []
    for pair in sorted(pairs, key=lambda one: (-one.nbytes, one.start - one.end, one.start)):
        span = held[pair.start : pair.end + 1]
        if pair.nbytes and span.max() > most_nbytes:
            found.append(pair)
            span -= pair.nbytes
    return found


def _order(problem: Problem, settled: Sequence[_Pair]) -> list[int]:
    late = {pair.end: pair.start for pair in settled if pair.gathers}
    early = {pair.start: pair.end for pair in settled if not pair.gathers}
    moved = {*late.values(), *early.values()}
    order = []
    for number in range(len(problem.kernels)):
        if number in late:
            order += [late[number], number]
        elif number in early:
            order += [number, early[number]]
        elif number not in moved:
            order.append(number)
    return order
