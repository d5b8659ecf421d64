"""All-gathers over hosts in phases: across hosts first, while the parts are small, then inside.

Results are bit-identical.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.hardware.machine import Grid, Groups, Machine
from memplan.xla.collectives.cost import GATHER, over_groups
from memplan.xla.collectives.writing import Builder, CollectiveEdit, counts_partitions
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array


@dataclass(frozen=True)
class Digits:
    """Positions of a group's members on a grid, as digits of their number in the group."""

    grid: Grid
    # of the grid that have a digit, in the order of the digits, the slowest first
    levels: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.grid.sizes[level] for level in self.levels)

    def pay(self, machine: Machine, kind: str, levels: Sequence[int], nbytes: int) -> bool:
        """Is a gather or scatter faster in phases, one for each of these levels?

        Args:
          levels: each phase has a part of the bytes of the one before. A gather has its phases in
            the opposite order.
          nbytes: of the whole on one device.
        """
        whole_s = over_groups(machine, kind, self.grid.rows, nbytes).seconds
        phases_s = 0.0
        for level in levels:
            phases_s += over_groups(machine, kind, self.grid.along({level}), nbytes).seconds
            nbytes //= self.grid.sizes[level]
        return phases_s < whole_s


def digits_of(machine: Machine, groups: Groups) -> Digits | None:
    """The digits of groups that reach several hosts; None if they reach one, or lack an order."""
    grid = machine.grid(groups)
    if grid is None:
        return None
    reached = [level for level, size in enumerate(grid.sizes) if size > 1]
    if len(reached) < 2:
        return None
    orders = itertools.permutations(reached)  # the machine's own first
    candidates = (Digits(grid, levels) for levels in orders if grid.in_order(levels) == groups)
    return next(candidates, None)


def gathers_in_phases(module: Module, machine: Machine) -> Module:
    """The module with all-gathers over hosts in phases, where that is faster."""
    edit = CollectiveEdit(module)
    for body in module.values():
        replacements: dict[str, Sequence[Instruction]] = {}
        for op in body.ops.values():
            if op.opcode == GATHER and isinstance(op.shape, Array) and counts_partitions(op):
                phases = _phases(edit, machine, body, op)
                if phases:
                    replacements[op.name] = phases
        if replacements:
            edit.splice(body, replacements)
    return edit.module


def _phases(
    edit: CollectiveEdit,
    machine: Machine,
    body: Computation,
    op: Instruction,
) -> Sequence[Instruction]:
    """The phases of a gather; none where it stays as XLA has it."""
    source = body.ops[op.operands[0]]
    array = source.result[0]
    digits = digits_of(machine, op.groups(len(machine.devices)))
    if digits is None or len(op.dimensions) != 1:
        return ()
    if not (op.result[0].is_row_major and array.is_row_major):
        return ()
    outward = sorted(digits.levels)  # across hosts first
    if not digits.pay(machine, GATHER, outward[::-1], op.nbytes):
        return ()
    (dim,) = op.dimensions
    builder = Builder(edit, op, op)
    value = source
    sizes: list[int] = []
    for level in outward:
        value = builder.reshape("one", value, 1, *sizes, *array.dims)
        sizes.insert(0, digits.grid.sizes[level])
        shape = edit.array(array.dtype, *sizes, *array.dims)
        groups = digits.grid.along({level})
        value = builder.collective("gather", GATHER, shape, value, groups=groups, dimensions=[0])
    # The digits lie before the array's dimensions, the last gathered first. They belong before the
    # gathered dimension, in the order of the group.
    inward = outward[::-1]
    count = len(inward)
    order = [
        *range(count, count + dim),
        *(inward.index(level) for level in digits.levels),
        *range(count + dim, count + len(array.dims)),
    ]
    if order != sorted(order):
        value = builder.transpose("turned", value, order)
    builder.end(op, "reshape", value)
    return builder.ops
