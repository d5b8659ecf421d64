"""All-gathers over hosts in phases: across hosts while the parts are small, then inside the host; the same bits."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.hardware.machine import Grid, Groups, Machine
from memplan.xla.collectives.cost import GATHER, over_groups
from memplan.xla.collectives.groups import DIMENSION, replica_groups
from memplan.xla.collectives.writing import Lines, Writer, counts_partitions, is_row_major, replaced
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array


@dataclass(frozen=True)
class Digits:
    """Where the members of a group stand on a grid, as digits of their number in the group.

    Attributes:
      levels: of the grid that have a digit, in the order of the digits, the slowest first.
    """

    grid: Grid
    levels: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.grid.sizes[level] for level in self.levels)

    def pay(self, machine: Machine, kind: str, levels: Sequence[int], nbytes: int) -> bool:
        """Is a gather or scatter faster in phases over these levels, each with a part of the bytes of the one before?

        Args:
          nbytes: of the whole on one device. A gather has its phases in the opposite order.
        """
        whole_s, phases_s = over_groups(machine, kind, self.grid.rows, nbytes).seconds, 0.0
        for level in levels:
            phases_s += over_groups(machine, kind, self.grid.along({level}), nbytes).seconds
            nbytes //= self.grid.sizes[level]
        return phases_s < whole_s


def digits_of(machine: Machine, groups: Groups) -> Digits | None:
    """The digits of groups that reach several hosts; None where they reach one, or their order has none."""
    grid = machine.grid(groups)
    reached = [level for level, size in enumerate(grid.sizes) if size > 1] if grid else []
    if grid is None or len(reached) < 2:
        return None
    orders = itertools.permutations(reached)  # the machine's own first
    return next((Digits(grid, levels) for levels in orders if grid.in_order(levels) == groups), None)


def gathers_in_phases(module: Module, machine: Machine, on_gpu: bool) -> Module:
    """The module with all-gathers over hosts in phases, where the links are faster so."""
    writer = Writer(module, lays_out=not on_gpu)
    for name in module:
        body = module[name]
        new = {
            op.name: lines
            for op in body.ops.values()
            if op.opcode == GATHER
            and isinstance(op.shape, Array)
            and counts_partitions(op)
            and (lines := _written(writer, machine, body, op))
        }
        if new:
            module = replaced(module, body, new, set())
    return module


def _written(writer: Writer, machine: Machine, body: Computation, op: Instruction) -> Sequence[str]:
    """The lines of a gather; none where it stays as XLA has it."""
    source, found = body.ops[op.operands[0]], DIMENSION.search(op.attributes)
    groups = replica_groups(op.attributes, len(machine.devices))
    digits = digits_of(machine, groups)
    if digits is None or found is None or not (is_row_major(op.result[0]) and is_row_major(source.result[0])):
        return ()
    outward = sorted(digits.levels)  # across hosts first
    if not digits.pay(machine, GATHER, outward[::-1], op.nbytes):
        return ()
    dim, array, lines = int(found[1]), source.result[0], Lines(writer, op)
    value, sizes = source.name, list[int]()
    for level in outward:
        along, size = digits.grid.along({level}), digits.grid.sizes[level]
        value = lines.reshape("one", value, array.dtype, 1, *sizes, *array.dims)
        sizes.insert(0, size)
        shape = writer.array(array.dtype, *sizes, *array.dims)
        value = lines.collective("gather", GATHER, shape, along, value, more=", dimensions={0}")
    # The digits lie before the array's dimensions, the last gathered first; they belong before the gathered one, in
    # the order of the group.
    lying = outward[::-1]
    count = len(lying)
    order = [
        *range(count, count + dim),
        *(lying.index(level) for level in digits.levels),
        *range(count + dim, count + len(array.dims)),
    ]
    if order != sorted(order):
        value = lines.transpose("turned", value, array.dtype, [*sizes, *array.dims], order)
    lines.end(op, "reshape", value)
    return lines.made
