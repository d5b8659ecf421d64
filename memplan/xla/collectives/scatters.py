"""Reduce-scatters over hosts in phases: inside the host first, then across hosts, each byte over a host's link once.

XLA:GPU's partitioner writes an all-reduce, and a slice at a place that follows from the partition's number; a later
pass makes one reduce-scatter of the two.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.cost import REDUCE, SCATTER
from memplan.xla.collectives.gathers import digits_of
from memplan.xla.collectives.groups import DIMENSION, replica_groups
from memplan.xla.collectives.writing import Lines, Writer, adds_by, adds_up, is_row_major, replaced
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_NUMBER = re.compile(r"-?\d+")


def scatters_in_phases(module: Module, machine: Machine) -> Module:
    """The module for a GPU with reduce-scatters over hosts in phases, where the links are faster so."""
    writer = Writer(module, lays_out=False)
    for name in module:
        body, new, dropped = module[name], dict[str, Sequence[str]](), set[str]()
        places = Places(body, len(machine.devices))
        for op in body.ops.values():
            if op.opcode not in (REDUCE, SCATTER) or not isinstance(op.shape, Array) or not adds_up(module, op):
                continue
            if not is_row_major(op.shape):
                continue
            groups = replica_groups(op.attributes, len(machine.devices))
            part, dim = _part(body, op, groups, places) if op.opcode == REDUCE else _own_part(op)
            if part is not None and (lines := _written(writer, machine, body, op, part, dim, groups)):
                new[part.name] = lines
                if part is not op:
                    dropped.add(op.name)
        if new:
            module = replaced(module, body, new, dropped)
    return module


def _own_part(op: Instruction) -> tuple[Instruction | None, int]:
    found = DIMENSION.search(op.attributes)
    return (op, int(found[1])) if found else (None, 0)


def _part(body: Computation, op: Instruction, groups: Groups, places: Places) -> tuple[Instruction | None, int]:
    """The slice of an all-reduce that takes, on each device of a group, the part of its position, and along which
    dimension; None if nobody reads the sum so.
    """
    users = [user for user, _ in body.uses[op.name]]
    if op.root or len(users) != 1 or users[0].opcode != "dynamic-slice" or not is_row_major(users[0].result[0]):
        return None, 0
    (cut,), whole = users, op.result[0].dims
    part = cut.result[0].dims
    dims = [dim for dim, (all_of, some) in enumerate(zip(whole, part, strict=True)) if all_of != some]
    if len(dims) != 1 or whole[dims[0]] != part[dims[0]] * len(groups[0]):
        return None, 0
    expected = np.zeros(len(places.partitions), int)
    for group in groups:
        expected[list(group)] = np.arange(len(group)) * part[dims[0]]
    for dim, name in enumerate(cut.operands[1:]):
        found = places.of(name)
        if found is None or (found != (expected if dim == dims[0] else 0)).any():
            return None, 0
    return cut, dims[0]


def _written(
    writer: Writer,
    machine: Machine,
    body: Computation,
    op: Instruction,
    part: Instruction,
    dim: int,
    groups: Groups,
) -> Sequence[str]:
    """The lines of a scatter; none where it stays as XLA has it."""
    digits, source = digits_of(machine, groups), body.ops[op.operands[0]]
    if digits is None:
        return ()
    inward = sorted(digits.levels, reverse=True)  # inside the host first
    if not digits.pay(machine, SCATTER, inward, source.nbytes):
        return ()
    lines, dtype, dims = Lines(writer, op), op.result[0].dtype, part.result[0].dims
    split = [*dims[:dim], *digits.sizes, *dims[dim:]]
    front = [dim + digits.levels.index(level) for level in inward]
    order = [*front, *(at for at in range(len(split)) if at not in front)]
    value = lines.reshape("split", source.name, dtype, *split)
    value = lines.transpose("turned", value, dtype, split, order)
    left = [split[at] for at in order]
    for level in inward:
        shape = writer.array(dtype, 1, *left[1:])
        more = f", dimensions={{0}}{adds_by(op)}"
        value = lines.collective("scatter", SCATTER, shape, digits.grid.along({level}), value, more=more)
        left = left[1:]
        if level != inward[-1]:
            value = lines.reshape("part", value, dtype, *left)
    lines.end(part, "reshape", value)
    return lines.made


_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.floor_divide,
    "remainder": np.remainder, "and": np.bitwise_and, "or": np.bitwise_or, "minimum": np.minimum,
    "maximum": np.maximum, "shift-left": np.left_shift, "shift-right-logical": np.right_shift,
}  # fmt: skip


class Places:
    """Integers of a computation that follow from the partition's number alone, for all partitions at once."""

    def __init__(self, body: Computation, count: int) -> None:
        self._body, self.partitions = body, np.arange(count)
        self.of = functools.cache(self._of)

    def _of(self, name: str) -> np.ndarray | None:
        """A number for each partition; None where it follows from something else. They are small and not negative."""
        op = self._body.ops[name]
        if op.opcode == "partition-id":
            return self.partitions
        if op.opcode == "constant":
            numbers = [int(one) for one in _NUMBER.findall(op.attributes.partition("metadata=")[0])]
            return np.full(len(self.partitions), numbers[0]) if op.result[0].size == 1 and numbers else None
        if op.opcode in ("convert", "reshape", "bitcast", "copy"):
            return self.of(op.operands[0])
        if op.opcode == "dynamic-slice" and op.result[0].size == 1 and len(op.operands) == 2:
            return self._looked_up(self._body.ops[op.operands[0]], self.of(op.operands[1]))
        operands = [self.of(operand) for operand in op.operands]
        if op.opcode not in _OPERATIONS or len(operands) != 2 or any(one is None for one in operands):
            return None
        found = _OPERATIONS[op.opcode](*operands)
        return found if (found >= 0).all() and (found < 2**31).all() else None

    def _looked_up(self, table: Instruction, at: np.ndarray | None) -> np.ndarray | None:
        if table.opcode != "constant" or at is None:
            return None
        numbers = np.array([int(one) for one in _NUMBER.findall(table.attributes.partition("metadata=")[0])])
        if len(numbers) != math.prod(table.result[0].dims) or (at >= len(numbers)).any():
            return None
        return numbers[at]
