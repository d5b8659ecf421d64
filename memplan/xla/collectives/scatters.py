"""Reduce-scatters over hosts in phases: inside the host first, then across hosts.

Each byte passes a host's link once. XLA:GPU's partitioner writes an all-reduce, and a slice at an
offset that follows from the partition's number; a later pass makes one reduce-scatter of the two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.cost import REDUCE, SCATTER
from memplan.xla.collectives.gathers import digits_of
from memplan.xla.collectives.writing import Builder, CollectiveEdit, adds_up
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array


def scatters_in_phases(module: Module, machine: Machine) -> Module:
    """The module for a GPU with reduce-scatters over hosts in phases, where that is faster."""
    edit = CollectiveEdit(module)
    for body in module.values():
        replacements: dict[str, Sequence[Instruction]] = {}
        dropped: set[str] = set()
        numbers = PartitionIntegers(body, len(machine.devices))
        for op in body.ops.values():
            if op.opcode not in (REDUCE, SCATTER) or not isinstance(op.shape, Array):
                continue
            if not adds_up(module, op) or not op.shape.is_row_major:
                continue
            groups = op.groups(len(machine.devices))
            part = _part(body, op, groups, numbers) if op.opcode == REDUCE else _own_part(op)
            phases = () if part is None else _phases(edit, machine, body, op, *part, groups)
            if part is not None and phases:
                replacements[part[0].name] = phases
                if part[0] is not op:
                    dropped.add(op.name)
        if replacements:
            edit.splice(body, replacements, dropped)
    return edit.module


def _own_part(op: Instruction) -> tuple[Instruction, int] | None:
    """A reduce-scatter itself, and the dimension that it scatters."""
    return (op, op.dimensions[0]) if len(op.dimensions) == 1 else None


def _part(
    body: Computation,
    op: Instruction,
    groups: Groups,
    numbers: PartitionIntegers,
) -> tuple[Instruction, int] | None:
    """The slice of an all-reduce that is all that is read of it, and the dimension that it cuts.

    It takes, on each device of a group, the part of the device's position in the group. None if
    the sum is read otherwise.
    """
    users = [user for user, _ in body.uses[op.name]]
    if op.root or len(users) != 1 or users[0].opcode != "dynamic-slice":
        return None
    (cut,) = users
    if not cut.result[0].is_row_major:
        return None
    whole_dims = op.result[0].dims
    part_dims = cut.result[0].dims
    sides = zip(whole_dims, part_dims, strict=True)
    cut_dims = [dim for dim, (whole_side, part_side) in enumerate(sides) if whole_side != part_side]
    if len(cut_dims) != 1:
        return None
    (cut_dim,) = cut_dims
    if whole_dims[cut_dim] != part_dims[cut_dim] * len(groups[0]):
        return None
    expected = np.zeros(len(numbers.partitions), int)
    for group in groups:
        expected[list(group)] = np.arange(len(group)) * part_dims[cut_dim]
    for dim, name in enumerate(cut.operands[1:]):
        offsets = numbers.of(name)
        if offsets is None or (offsets != (expected if dim == cut_dim else 0)).any():
            return None
    return cut, cut_dim


def _phases(
    edit: CollectiveEdit,
    machine: Machine,
    body: Computation,
    op: Instruction,
    part: Instruction,
    dim: int,
    groups: Groups,
) -> Sequence[Instruction]:
    """The phases of a scatter; none where it stays as XLA has it."""
    digits = digits_of(machine, groups)
    source = body.ops[op.operands[0]]
    if digits is None:
        return ()
    inward = sorted(digits.levels, reverse=True)  # inside the host first
    if not digits.pay(machine, SCATTER, inward, source.nbytes):
        return ()
    builder = Builder(edit, op, op)
    dtype = op.result[0].dtype
    dims = part.result[0].dims
    split = [*dims[:dim], *digits.sizes, *dims[dim:]]
    front = [dim + digits.levels.index(level) for level in inward]
    order = [*front, *(dim for dim in range(len(split)) if dim not in front)]
    value = builder.reshape("split", source, *split)
    value = builder.transpose("turned", value, order)
    for level in inward:
        _, *piece_dims = value.result[0].dims
        value = builder.collective(
            "scatter",
            SCATTER,
            edit.array(dtype, 1, *piece_dims),
            value,
            groups=digits.grid.along({level}),
            dimensions=[0],
            to_apply=op.to_apply,
        )
        if level != inward[-1]:
            value = builder.reshape("part", value, *piece_dims)
    builder.end(part, "reshape", value)
    return builder.ops


# Computes an integer instruction, by opcode.
_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.floor_divide,
    "remainder": np.remainder, "and": np.bitwise_and, "or": np.bitwise_or, "minimum": np.minimum,
    "maximum": np.maximum, "shift-left": np.left_shift, "shift-right-logical": np.right_shift,
}  # fmt: skip


class PartitionIntegers:
    """Integers of a computation that follow from the partition's number, on all partitions."""

    def __init__(self, body: Computation, count: int) -> None:
        self._body = body
        self.partitions = np.arange(count)
        self.of = functools.cache(self._of)

    def _of(self, name: str) -> np.ndarray | None:
        """A number for each partition, below 2**31 and not negative.

        None if it follows from something else than the partition's number.
        """
        op = self._body.ops[name]
        if op.opcode == "partition-id":
            return self.partitions
        if op.opcode == "constant":
            if op.result[0].size != 1 or not op.integers:
                return None
            return np.full(len(self.partitions), op.integers[0])
        if op.opcode in ("convert", "reshape", "bitcast", "copy"):
            return self.of(op.operands[0])
        if op.opcode == "dynamic-slice" and op.result[0].size == 1 and len(op.operands) == 2:
            return self._looked_up(self._body.ops[op.operands[0]], self.of(op.operands[1]))
        operands = [self.of(operand) for operand in op.operands]
        if op.opcode not in _OPERATIONS or len(operands) != 2:
            return None
        if any(operand is None for operand in operands):
            return None
        numbers = _OPERATIONS[op.opcode](*operands)
        return numbers if (numbers >= 0).all() and (numbers < 2**31).all() else None

    def _looked_up(self, table: Instruction, indices: np.ndarray | None) -> np.ndarray | None:
        if table.integers is None or indices is None:
            return None
        numbers = np.array(table.integers)
        if len(numbers) != math.prod(table.result[0].dims) or (indices >= len(numbers)).any():
            return None
        return numbers[indices]
