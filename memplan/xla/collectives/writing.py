"""New instructions of a module that XLA has partitioned and not yet scheduled."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

from memplan.hardware.machine import Groups
from memplan.xla.collectives.cost import EXCHANGE
from memplan.xla.edit import Edit, Facts, instruction
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import NO_LAYOUT, Array, Shape


def counts_partitions(op: Instruction) -> bool:
    """Are the numbers in its groups those of partitions, and does nothing demand an order of it?"""
    return op.counts_devices and not op.predecessors


class CollectiveEdit(Edit):
    """Changes a module's collectives, with channels that the module does not have."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        arrays = (array for op in module.entry.ops.values() for array in op.result)
        # XLA:CPU has assigned layouts already, XLA:GPU has not.
        self._has_layouts = any(array.layout != NO_LAYOUT for array in arrays)
        ops = itertools.chain.from_iterable(body.ops.values() for body in module.values())
        channels = (op.channel for op in ops if op.channel is not None)
        self._channels = itertools.count(1 + max(channels, default=0))

    def array(self, dtype: str, *dims: int) -> Array:
        return Array.row_major(dtype, dims) if self._has_layouts else Array(dtype, dims)

    def channel(self) -> int:
        return next(self._channels)

    def splice(
        self,
        body: Computation,
        replacements: Mapping[str, Sequence[Instruction]],
        dropped: Collection[str] = (),
    ) -> None:
        """Replace instructions of a computation.

        Args:
          replacements: name of an instruction -> the instructions that take its place.
          dropped: instructions that nobody reads any more.
        """
        ops: list[Instruction] = []
        for op in body.ops.values():
            if op.name not in dropped:
                ops += replacements.get(op.name, (op,))
        self.replace(body.with_ops(_operands_first(ops)))


@dataclass
class Builder:
    """Makes the instructions that take the place of a collective, or of several."""

    edit: CollectiveEdit
    origin: Instruction  # new names begin with its name
    source: Instruction  # new instructions have its metadata
    ops: list[Instruction] = field(default_factory=list)

    def add(
        self,
        mark: str,
        opcode: str,
        shape: Shape,
        *operands: Instruction,
        **facts: Unpack[Facts],
    ) -> Instruction:
        name = self.edit.fresh(self.origin.name, mark)
        names = [operand.name for operand in operands]
        op = instruction(name, opcode, shape, names, like=self.source, **facts)
        self.ops.append(op)
        return op

    def end(self, replaced: Instruction, opcode: str, operand: Instruction) -> None:
        """Add the instruction that gives the value of a replaced one, under its name."""
        op = instruction(
            replaced.name,
            opcode,
            replaced.shape,
            [operand.name],
            like=self.source,
            root=replaced.root,
        )
        self.ops.append(op)

    def end_by_sum(
        self,
        replaced: Instruction,
        collective: Instruction,
        operand: Instruction,
    ) -> None:
        """End by a copy of an all-reduce, with another operand and a channel of its own."""
        op = collective.changed(
            name=replaced.name,
            operands=[operand.name],
            shape=replaced.shape,
            root=replaced.root,
            channel=None if collective.channel is None else self.edit.channel(),
        )
        self.ops.append(op)

    def collective(
        self,
        mark: str,
        kind: str,
        shape: Shape,
        *operands: Instruction,
        **facts: Unpack[Facts],
    ) -> Instruction:
        """Add a collective over groups of partitions, on a channel of its own."""
        facts["channel"] = self.edit.channel()
        if kind != EXCHANGE:
            facts["counts_devices"] = True
        return self.add(mark, kind, shape, *operands, **facts)

    def exchanged(
        self,
        groups: Groups,
        parts: Sequence[Instruction],
    ) -> list[Instruction]:
        """The part for this device from every device of its group.

        An all-to-all of as many operands exchanges them.
        """
        shapes = [part.shape for part in parts]
        exchange = self.collective("exchange", EXCHANGE, tuple(shapes), *parts, groups=groups)
        return [
            self.add("received", "get-tuple-element", shape, exchange, index=index)
            for index, shape in enumerate(shapes)
        ]

    def exchanged_sum(self, groups: Groups, parts: Sequence[Instruction]) -> Instruction:
        """The sum of the parts for this device, in the order of the group."""
        total, *terms = self.exchanged(groups, parts)
        for term in terms:
            total = self.add("added", "add", term.shape, total, term)
        return total

    def reshape(self, mark: str, operand: Instruction, *dims: int) -> Instruction:
        shape = self.edit.array(operand.result[0].dtype, *dims)
        return self.add(mark, "reshape", shape, operand)

    def transpose(self, mark: str, operand: Instruction, order: Sequence[int]) -> Instruction:
        array = operand.result[0]
        shape = self.edit.array(array.dtype, *(array.dims[dim] for dim in order))
        return self.add(mark, "transpose", shape, operand, dimensions=order)

    def scalar(self, dtype: str, value: int) -> Instruction:
        return self.add("scalar", "constant", Array(dtype, ()), literal=value)


def waits_for(op: Instruction) -> tuple[str, ...]:
    """Names of the instructions that have to stand before it."""
    return *op.operands, *op.predecessors


def ordered(body: Computation) -> set[str]:
    """Instructions with an order among them beyond what they read."""
    later = [op for op in body.ops.values() if op.predecessors]
    return {name for op in later for name in (op.name, *op.predecessors)}


def adds_up(module: Module, op: Instruction) -> bool:
    """Does an all-reduce or reduce-scatter add, over groups of partitions?"""
    reducer = module[op.to_apply]
    parameters = {parameter.name for parameter in reducer.parameters.values()}
    adds = reducer.root.opcode == "add" and set(reducer.root.operands) == parameters
    return adds and counts_partitions(op)


def _operands_first(ops: Iterable[Instruction]) -> list[Instruction]:
    """The instructions with each behind what it reads, in their order otherwise."""
    by_name = {op.name: op for op in ops}
    placed: dict[str, Instruction] = {}
    for name in by_name:
        stack = [name]
        while stack:
            op = by_name[stack[-1]]
            missing = [operand for operand in waits_for(op) if operand not in placed]
            if op.name in placed or not missing:
                placed.setdefault(op.name, op)
                stack.pop()
            else:
                stack += missing
    return list(placed.values())
