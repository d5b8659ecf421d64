"""All-gathers over hosts in phases: across hosts while the parts are small, then inside the host; the same bits."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.hardware.machine import Grid, Groups, Machine
from memplan.xla.collectives.cost import GATHER, collective
from memplan.xla.collectives.groups import replica_groups, written
from memplan.xla.collectives.writing import Lines, Writer, counts_partitions, is_row_major, replaced
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_DIMENSION = re.compile(r"\bdimensions=\{(\d+)\}")


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


def digits_of(machine: Machine, groups: Groups) -> Digits | None:
    """The digits of groups that reach several hosts; None where they reach one, or their order has none."""
    grid = machine.grid(groups)
    if grid is None or sum(size > 1 for size in grid.sizes) < 2:
        return None
    for levels in _orders([level for level, size in enumerate(grid.sizes) if size > 1]):
        found = Digits(grid, tuple(levels))
        if all(_in_order(found, row) == group for row, group in zip(grid.rows, groups, strict=True)):
            return found
    return None


def _orders(levels: Sequence[int]) -> list[list[int]]:
    """All orders, the machine's own first."""
    if not levels:
        return [[]]
    return [[one, *rest] for one in levels for rest in _orders([level for level in levels if level != one])]


def _in_order(digits: Digits, row: Sequence[int]) -> tuple[int, ...]:
    """A row of the grid, as a group with these digits lists it."""
    sizes = digits.grid.sizes
    strides = [math.prod(sizes[level + 1 :]) for level in range(len(sizes))]
    found = [0]
    for level in digits.levels:
        found = [number + at * strides[level] for number in found for at in range(sizes[level])]
    return tuple(row[number] for number in found)


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
    source, found = body.ops[op.operands[0]], _DIMENSION.search(op.attributes)
    groups = replica_groups(op.attributes, len(machine.devices))
    digits = digits_of(machine, groups)
    if digits is None or found is None or not (is_row_major(op.result[0]) and is_row_major(source.result[0])):
        return ()
    phases = [(level, digits.grid.along({level})) for level in sorted(digits.levels)]  # across hosts first
    if not _pays(machine, op, groups, source.nbytes, [(g, digits.grid.sizes[level]) for level, g in phases]):
        return ()
    dim, array, lines = int(found[1]), source.result[0], Lines(writer, op)
    value, sizes = source.name, list[int]()
    for level, along in phases:
        size = digits.grid.sizes[level]
        value = lines.reshape("one", value, array.dtype, 1, *sizes, *array.dims)
        sizes.insert(0, size)
        shape = writer.array(array.dtype, *sizes, *array.dims)
        value = lines.collective("gather", GATHER, shape, along, value, more=", dimensions={0}")
    # The digits lie before the array's dimensions, the last gathered first; they belong before the gathered one, in
    # the order of the group.
    lying = [level for level, _ in reversed(phases)]
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


def _pays(machine: Machine, op: Instruction, groups: Groups, nbytes: int, phases: Sequence[tuple[Groups, int]]) -> bool:
    """Do the phases of a gather of parts of so many bytes take less time on the links than the whole?"""
    whole_s = collective(machine, op.opcode, op.attributes, nbytes, op.nbytes).seconds
    phases_s = 0.0
    for along, size in phases:
        nbytes *= size
        phases_s += collective(machine, op.opcode, f"replica_groups={written(along)}", 0, nbytes).seconds
    return phases_s < whole_s
