"""Makes asynchronous collectives synchronous where those in flight hold much memory.

XLA's scheduler starts gathers long before their values are read, and ends other collectives late.
In the meantime none of their values can be recomputed: a gather's result is incomplete, and the
operands of other collectives are still read. Where pairs hold much, a gather starts right before
its end, and any other collective ends right after its start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.legal import pair_ends
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import runs
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import Module
from memplan.xla.write import write

# Pairs in flight may hold half of the limit; the other half is for kernels and for values that may
# be recomputed.
_MAX_SHARE = 0.5


@dataclass(frozen=True)
class _Pair:
    """An asynchronous collective, by the numbers of the kernels that start and end it."""

    start: int
    end: int
    gathers: bool
    nbytes: int  # that are freed sooner, or allocated later, if nothing runs beside it


def settle_pairs(module: Module, problem: Problem, room_nbytes: int) -> Module:
    """The module with some collectives synchronous; itself where pairs hold little.

    Args:
      problem: the module's, by `problem_of`.
      room_nbytes: limit of bytes of temporaries.
    """
    settled = _largest(problem, _pairs(module, problem), _MAX_SHARE * room_nbytes)
    if not settled:
        return module
    return write(module, problem, runs(_order(problem, settled)))


def _pairs(module: Module, problem: Problem) -> Sequence[_Pair]:
    """The asynchronous collectives of a module."""
    pairs: list[_Pair] = []
    for start, end in pair_ends(problem).items():
        kernel = problem.kernels[start]
        opcode = module.instructions[kernel.name].opcode
        if not is_collective(opcode):
            continue
        gathers = opcode == "all-gather-start"
        numbers = kernel.writes if gathers else kernel.reads
        buffers = [problem.buffers[number] for number in numbers]
        if not gathers:  # what is updated in place is not freed
            written = {problem.buffers[number].alias_set for number in kernel.writes}
            buffers = [buffer for buffer in buffers if buffer.alias_set not in written]
        nbytes = sum(buffer.nbytes for buffer in buffers if buffer.role is Role.TEMPORARY)
        pairs.append(_Pair(start, end, gathers, nbytes))
    return pairs


def _largest(problem: Problem, pairs: Sequence[_Pair], max_nbytes: float) -> list[_Pair]:
    """The largest pairs, as many as have to go so that the others never hold more than so much."""
    held_nbytes = np.zeros(len(problem.kernels), np.int64)  # by kernel
    for pair in pairs:
        held_nbytes[pair.start : pair.end + 1] += pair.nbytes
    largest: list[_Pair] = []
    for pair in sorted(pairs, key=lambda pair: (-pair.nbytes, pair.start - pair.end, pair.start)):
        span = held_nbytes[pair.start : pair.end + 1]
        if pair.nbytes and span.max() > max_nbytes:
            largest.append(pair)
            span -= pair.nbytes
    return largest


def _order(problem: Problem, settled: Sequence[_Pair]) -> list[int]:
    """Numbers of all kernels, with the settled pairs side by side."""
    start_of = {pair.end: pair.start for pair in settled if pair.gathers}
    end_of = {pair.start: pair.end for pair in settled if not pair.gathers}
    moved = {*start_of.values(), *end_of.values()}
    order: list[int] = []
    for number in range(len(problem.kernels)):
        if number in start_of:
            order += [start_of[number], number]
        elif number in end_of:
            order += [number, end_of[number]]
        elif number not in moved:
            order.append(number)
    return order
