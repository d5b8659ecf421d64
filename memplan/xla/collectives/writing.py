"""New instructions of a module that XLA has partitioned and not yet scheduled."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.hardware.machine import Groups
from memplan.xla.collectives.groups import written
from memplan.xla.module import (
    METADATA,
    Computation,
    Instruction,
    Module,
    Names,
    predecessors,
    read_instruction,
    without_metadata,
)
from memplan.xla.shapes import Array

_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


def is_row_major(array: Array) -> bool:
    """Do its elements lie in the order of its indices, untiled and in the device's memory? Before XLA assigns layouts,
    every array's do.
    """
    order = [int(dim) for dim in re.findall(r"\d+", array.layout)]
    return ":" not in array.layout and order == sorted(order, reverse=True)


def counts_partitions(op: Instruction) -> bool:
    """Are the numbers in its groups those of partitions, and does nothing demand an order of it?"""
    return "use_global_device_ids=true" in op.attributes and not predecessors(op)


@dataclass
class Writer:
    """Makes instructions, with names and channels that the module does not have.

    Attributes:
      lays_out: XLA has assigned layouts already, and wants one of every array.
    """

    module: Module
    lays_out: bool
    _names: Names = field(init=False)
    _channels: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._names = Names(self.module)
        used = (int(channel) for text in self.module.texts.values() for channel in _CHANNEL.findall(text))
        self._channels = itertools.count(1 + max(used, default=0))

    def array(self, dtype: str, *dims: int) -> Array:
        layout = "{" + ",".join(map(str, reversed(range(len(dims))))) + "}" if self.lays_out and dims else ""
        return Array(dtype, tuple(dims), layout)

    def channel(self) -> int:
        return next(self._channels)

    def fresh(self, name: str, mark: str) -> str:
        return self._names.fresh(name, mark)

    def once_more(self, attributes: str) -> str:
        """Attributes of a collective for another one like it, on a channel of its own; `Lines` adds the metadata."""
        return _CHANNEL.sub(lambda _: f"channel_id={self.channel()}", without_metadata(attributes))


@dataclass
class Lines:
    """The instructions that take the place of a collective, or of several."""

    writer: Writer
    origin: Instruction  # whose name, in part, and metadata they have
    made: list[str] = field(default_factory=list)

    def add(self, mark: str, shape: Array | Sequence[Array], call: str, *operands: str, more: str = "") -> str:
        """An instruction: its name."""
        name = self.writer.fresh(self.origin.name, mark)
        self._put(name, shape, call, f"({_listed(operands)})", more)
        return name

    def end(self, op: Instruction, call: str, *operands: str, more: str = "") -> None:
        """The instruction that gives the value of one that is replaced, under its name."""
        assert isinstance(op.shape, Array)
        self._put(op.name, op.shape, call, f"({_listed(operands)})", more, "ROOT " if op.root else "")

    def collective(
        self, mark: str, kind: str, shape: Array | Sequence[Array], groups: Groups, *operands: str, more: str = ""
    ) -> str:
        flag = "" if kind == "all-to-all" else ", use_global_device_ids=true"
        where = f", channel_id={self.writer.channel()}, replica_groups={written(groups)}{flag}"
        return self.add(mark, shape, kind, *operands, more=where + more)

    def exchanged(self, part: Array, groups: Groups, parts: Sequence[str]) -> list[str]:
        """The part for this device from every device of its group, by an all-to-all of as many operands."""
        sent = self.collective("exchange", "all-to-all", [part] * len(parts), groups, *parts)
        return [
            self.add("received", part, "get-tuple-element", sent, more=f", index={index}")
            for index in range(len(parts))
        ]

    def exchanged_sum(self, part: Array, groups: Groups, parts: Sequence[str]) -> str:
        """The sum of those, in the order of the group."""
        value, *others = self.exchanged(part, groups, parts)
        for other in others:
            value = self.add("added", part, "add", value, other)
        return value

    def reshape(self, mark: str, operand: str, dtype: str, *dims: int) -> str:
        return self.add(mark, self.writer.array(dtype, *dims), "reshape", operand)

    def transpose(self, mark: str, operand: str, dtype: str, dims: Sequence[int], order: Sequence[int]) -> str:
        turned = self.writer.array(dtype, *(dims[one] for one in order))
        return self.add(mark, turned, "transpose", operand, more=f", dimensions={{{','.join(map(str, order))}}}")

    def scalar(self, dtype: str, value: int) -> str:
        name = self.writer.fresh(self.origin.name, "scalar")
        self._put(name, Array(dtype, ()), "constant", f"({value})", "")
        return name

    def _put(self, name: str, shape: Array | Sequence[Array], call: str, given: str, more: str, root: str = "") -> None:
        text = str(shape) if isinstance(shape, Array) else f"({', '.join(map(str, shape))})"
        told = METADATA.search(self.origin.attributes)
        self.made.append(f"  {root}%{name} = {text} {call}{given}{more}{f', {told[0]}' if told else ''}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"%{name}" for name in names)


def waits_for(op: Instruction) -> tuple[str, ...]:
    """Names of the instructions that have to stand before it."""
    return *op.operands, *predecessors(op)


def ordered(body: Computation) -> set[str]:
    """Instructions that have to stand before or behind others which they do not read, and those others."""
    pairs = ((op.name, predecessors(op)) for op in body.ops.values() if "control-predecessors=" in op.attributes)
    return {name for after, before in pairs for name in (after, *before)}


def adds_by(op: Instruction) -> str:
    """The attribute of a sum that names the computation which adds, for others of its kind."""
    return f", to_apply={op.attribute('to_apply')}"


def adds_up(module: Module, op: Instruction) -> bool:
    """Does an all-reduce or reduce-scatter add, over groups of partitions?"""
    reducer = module[op.attribute("to_apply").lstrip("%")]
    parameters = {one.name for one in reducer.parameters.values()}
    adds = reducer.root.opcode == "add" and set(reducer.root.operands) == parameters
    return adds and counts_partitions(op)


def replaced(module: Module, body: Computation, new: Mapping[str, Sequence[str]], dropped: set[str]) -> Module:
    """The module with other instructions in one of its computations.

    Args:
      new: instruction -> the lines that take its place.
      dropped: instructions that nobody reads any more.
    """
    lines: list[str] = []
    for op in body.ops.values():
        if op.name not in dropped:
            lines += new.get(op.name, (op.line,))
    return module.with_texts({**module.texts, body.name: body.text_with(_operands_first(lines))})


def _operands_first(lines: Sequence[str]) -> list[str]:
    """The lines with each behind what it reads, in their order otherwise."""
    ops = {op.name: op for op in map(read_instruction, lines)}
    done: dict[str, str] = {}
    for first in ops:
        todo = [first]
        while todo:
            op = ops[todo[-1]]
            before = [name for name in waits_for(op) if name not in done]
            if op.name in done or not before:
                done.setdefault(op.name, op.line)
                todo.pop()
            else:
                todo += before
    return list(done.values())
