"""A module -> a serialized HloModuleProto.

XLA wants a number of everything. What did not change keeps its own, and is written as it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.xla.module import Computation, Instruction, Module, in_order
from memplan.xla.schema import LOCAL_BITS, ComputationMessage, ModuleMessage
from memplan.xla.shapes import complete_layout, shape_message, shape_of

_LOCAL = (1 << LOCAL_BITS) - 1


def serialize(module: Module) -> bytes:
    """A serialized HloModuleProto."""
    return _Writer(module).proto()


class _Writer:
    """Gives numbers to what changed in a module."""

    def __init__(self, module: Module) -> None:
        self._module, self._numbers = module, module.numbers
        self._message = ModuleMessage()
        self._message.CopyFrom(module.message)
        del self._message.computations[:]
        self._last_id = max(module.numbers.computations)
        self._ids: dict[str, int] = {}  # of computations
        self._used_wrappers: set[int] = set()
        # An instruction has one name in the whole module. Those of new computations and of fusions
        # that changed give way.
        self._taken = set[str]()
        for body in module.values():
            if body.is_as_read:
                self._taken.update(op.name for op in body.message.instructions)
            elif not _gives_way(body):
                self._taken.update(body.ops)

    def proto(self) -> bytes:
        for body in self._module.values():
            if body.is_as_read:
                self._ids[body.name] = body.message.id
                self._add_wrappers_of(body)
                self._message.computations.append(body.message)
            else:
                self._message.computations.append(self._written(body))
        self._message.ClearField("schedule")
        for body in self._message.computations if self._numbers.schedule else ():
            if not body.is_fusion_computation:
                order = self._order(body)
                self._message.schedule.sequences.add(key=body.id).value.instruction_ids.extend(
                    order
                )
        if not self._module.is_scheduled:
            for body in self._message.computations:
                _complete_layouts(body)
        return self._message.SerializeToString()

    def _order(self, message: Any) -> Sequence[int]:
        """Ids in the order in which they run."""
        body = self._module.get(message.name)  # None of what an asynchronous start wraps
        if message.id in self._numbers.schedule and (body is None or body.is_as_read):
            return self._numbers.schedule[message.id]
        return [op.id for op in message.instructions]

    def _add_wrappers_of(self, body: Computation) -> None:
        """What the asynchronous starts of a computation that did not change call."""
        for op in body.message.instructions:
            if (
                op.opcode == "async-start"
                and op.called_computation_ids[0] in self._numbers.wrappers
            ):
                self._used_wrappers.add(op.called_computation_ids[0])
                self._message.computations.append(
                    self._numbers.computations[op.called_computation_ids[0]]
                )

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _written(self, body: Computation) -> Any:
        message = ComputationMessage(name=body.name, is_fusion_computation=body.is_fused)
        read = body.message if body.message is not None and body.message.name == body.name else None
        message.id = self._new_id() if read is None else read.id
        self._ids[body.name] = message.id
        known = {} if read is None else {op.name: op.id for op in read.instructions}
        last = max([(message.id << LOCAL_BITS) - 1, *known.values()])
        numbers: dict[str, int] = {}
        for name in body.ops:
            last += name not in known
            numbers[name] = known.get(name, last)
        for op in body.ops.values():
            written = message.instructions.add()
            written.CopyFrom(op.message if op.start is None else op.start)
            written.name = self._own_name(body, op.name)
            written.id = numbers[op.name]
            written.operand_ids[:] = [numbers[operand] for operand in op.operands]
            written.control_predecessor_ids[:] = [numbers[name] for name in op.predecessors]
            if shape_of(written.shape) != op.shape:
                written.shape.CopyFrom(shape_message(op.shape))
            if op.start is not None:
                written.called_computation_ids[:] = [self._wrapper(op)]
            else:
                written.called_computation_ids[:] = [self._ids[name] for name in op.called]
                written.called_computation_ids[:] = in_order(written)
            if op.root:
                message.root_id = written.id
        parameters = [op for op in message.instructions if op.opcode == "parameter"]
        parameters.sort(key=lambda op: op.parameter_number)
        message.program_shape.parameters.extend(op.shape for op in parameters)
        message.program_shape.parameter_names.extend(op.name for op in parameters)
        root = next(op for op in message.instructions if op.id == message.root_id)
        message.program_shape.result.CopyFrom(root.shape)
        return message

    def _own_name(self, body: Computation, name: str) -> str:
        """A name that no instruction of another computation has."""
        if not _gives_way(body):
            return name
        own, number = name, 1
        while own in self._taken:
            number += 1
            own = f"{name}.{number}"
        self._taken.add(own)
        return own

    def _wrapper(self, op: Instruction) -> int:
        """The number of a computation that wraps what an asynchronous start starts; each start has
        its own.
        """
        message = ComputationMessage()
        message.CopyFrom(self._numbers.computations[op.start.called_computation_ids[0]])
        root = next(inner for inner in message.instructions if inner.id == message.root_id)
        if op.message is not root:
            name, inner_id, operands = root.name, root.id, list(root.operand_ids)
            root.CopyFrom(op.message)
            root.name, root.id = name, inner_id
            root.operand_ids[:] = operands
        root.called_computation_ids[:] = [self._ids[name] for name in op.called]
        if message.id in self._used_wrappers:
            self._renumber(message, op.name)
        self._used_wrappers.add(message.id)
        self._message.computations.append(message)
        return message.id

    def _renumber(self, message: Any, prefix: str) -> None:
        """Give a computation and its instructions other numbers and names."""
        message.id, message.name = self._new_id(), f"{prefix}.{message.name}"
        ids = {op.id: (message.id << LOCAL_BITS) | (op.id & _LOCAL) for op in message.instructions}
        for op in message.instructions:
            op.name, op.id = f"{prefix}.{op.name}", ids[op.id]
            op.operand_ids[:] = [ids[operand] for operand in op.operand_ids]
        message.root_id = ids[message.root_id]


def _complete_layouts(body: Any) -> None:
    """Give arrays without a layout the default one.

    XLA:GPU assigns layouts late, but has passes before that which ask for one: the motion of sums
    out of loops aborts the process without.
    """
    shapes = [
        *(op.shape for op in body.instructions),
        *body.program_shape.parameters,
        body.program_shape.result,
    ]
    for shape in shapes:
        complete_layout(shape)


def _gives_way(body: Computation) -> bool:
    """Do its instructions get other names if others have theirs?"""
    return body.is_new or body.is_fused
