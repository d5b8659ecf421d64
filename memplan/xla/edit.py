"""Changes to a module: `Edit`, and new instructions and computations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from memplan.hardware.machine import Groups
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.schema import InstructionMessage, LiteralMessage
from memplan.xla.shapes import Array, Shape, shape_message


class Names:
    """Names of a module, and new ones: the old name, a mark and a number."""

    def __init__(self, module: Module) -> None:
        self._taken = {name for body in module.values() for name in body.ops} | set(module)

    def fresh(self, name: str, mark: str, number: int = 1) -> str:
        """The first from this number on that is not taken."""
        while (new := f"{name}.{mark}{number}") in self._taken:
            number += 1
        self._taken.add(new)
        return new


class Edit:
    """Changes a module: the one way to do so.

    Instructions and computations are values: an edit replaces computations by others
    (`Computation.with_ops`) and adds new ones (`fused_computation`, `clone`); what it does not
    touch stays the same object.
    """

    def __init__(self, module: Module) -> None:
        self._module, self._names = module, Names(module)
        self._changed: dict[str, Computation] = {}
        self._new: dict[str, list[Computation]] = {}  # by the computation that they stand before

    def fresh(self, name: str, mark: str, number: int = 1) -> str:
        """A new name: the old one, a mark and the first number from this one on that is not
        taken.
        """
        return self._names.fresh(name, mark, number)

    def __getitem__(self, name: str) -> Computation:
        """The computation as it is by now."""
        return self._changed.get(name) or self._module[name]

    def replace(self, body: Computation, new: Iterable[Computation] = ()) -> None:
        """Put another computation in the place of the one with its name, and new ones that it calls
        before it.
        """
        self._changed[body.name] = body
        self._new.setdefault(body.name, []).extend(new)

    def clone(self, name: str, mark: str, number: int = 1) -> list[Computation]:
        """Copies of a computation and of those that it calls, as the module has them; callees
        first, its own last.

        Args:
          mark, number: of the new names, see `fresh`.
        """
        copied, body = self.fresh(name, mark, number), self._module[name]
        called: dict[str, str] = {}
        copies: list[Computation] = []
        for callee in dict.fromkeys(callee for op in body.ops.values() for callee in op.called):
            copies += self.clone(callee, mark, number)
            called[callee] = copies[-1].name
        return [*copies, body.cloned(copied, called)]

    @property
    def module(self) -> Module:
        """The module with all changes; the module itself if there are none."""
        if not self._changed:
            return self._module
        computations: dict[str, Computation] = {}
        for name in self._module:
            computations.update((body.name, body) for body in self._new.get(name, ()))
            computations[name] = self[name]
        return self._module.with_computations(computations)


def fused_computation(
    name: str, parameters: Sequence[tuple[str, Shape]], ops: Iterable[Instruction]
) -> Computation:
    """A new computation for a fusion.

    Args:
      parameters: names and shapes, in order.
      ops: its instructions without parameters; one is the root.
    """
    arguments = [
        instruction(parameter, "parameter", shape, parameter_number=number)
        for number, (parameter, shape) in enumerate(parameters)
    ]
    return Computation(name, True, None, None).with_ops([*arguments, *ops])


class Facts(TypedDict, total=False):
    """What a new instruction states, by the names of the facts of `Instruction`."""

    channel: int
    groups: Groups
    counts_devices: bool
    dimensions: Sequence[int]
    slices: Sequence[tuple[int, int, int]]
    padding: Sequence[tuple[int, int, int]]
    index: int
    parameter_number: int
    to_apply: str
    literal: int  # the element of a scalar constant


def instruction(
    name: str,
    opcode: str,
    shape: Shape,
    operands: Sequence[str] = (),
    *,
    like: Instruction | None = None,
    root: bool = False,
    **facts: Unpack[Facts],
) -> Instruction:
    """A new instruction.

    Args:
      like: an instruction of the same source line, which gives the metadata.
    """
    message = InstructionMessage(opcode=opcode)
    message.shape.CopyFrom(shape_message(shape))
    message.channel_id = facts.get("channel", 0)
    message.use_global_device_ids = facts.get("counts_devices", False)
    message.dimensions.extend(facts.get("dimensions", ()))
    message.tuple_index = facts.get("index", 0)
    message.parameter_number = facts.get("parameter_number", 0)
    for group in facts.get("groups", ()):
        message.collective_device_list.replica_groups.add(replica_ids=group)
    for start, limit, stride in facts.get("slices", ()):
        message.slice_dimensions.add(start=start, limit=limit, stride=stride)
    for low, high, interior in facts.get("padding", ()):
        message.padding_config.dimensions.add(
            edge_padding_low=low,
            edge_padding_high=high,
            interior_padding=interior,
        )
    if "literal" in facts:
        message.literal.CopyFrom(_scalar_literal(shape, facts["literal"]))
    if like is not None and like.has_metadata:
        message.metadata.CopyFrom(like.metadata)
    called = (facts["to_apply"],) if "to_apply" in facts else ()
    return Instruction(name, opcode, shape, tuple(operands), called, (), root, message)


def _scalar_literal(shape: Shape, value: int) -> Any:
    """A literal of one number: any of a type that protobuf has, zero of others."""
    assert isinstance(shape, Array) and not shape.dims
    literal = LiteralMessage(shape=shape_message(shape))
    elements = getattr(literal, f"{shape.dtype}s")
    if not isinstance(elements, bytes):
        elements.append(value)
    else:
        assert value == 0
        setattr(literal, f"{shape.dtype}s", bytes(shape.nbytes))
    return literal


def bitcast(name: str, shape: Shape, operand: str) -> Instruction:
    """The operand's bytes under another shape."""
    return instruction(name, "bitcast", shape, (operand,))


def tuple_element(name: str, shape: Shape, operand: str, index: int) -> Instruction:
    return instruction(name, "get-tuple-element", shape, (operand,), index=index)


def tuple_of(
    name: str, shapes: Sequence[Shape], operands: Sequence[str], root: bool = False
) -> Instruction:
    return instruction(name, "tuple", tuple(shapes), operands, root=root)


def copy(name: str, shape: Shape, operand: str, root: bool = False) -> Instruction:
    return instruction(name, "copy", shape, (operand,), root=root)


def copy_start(
    name: str, target: Array, source: Array, operand: str, frontend_attributes: Mapping[str, str]
) -> Instruction:
    """The start of an asynchronous copy between memories, which the arrays' layouts name."""
    start = instruction(name, "copy-start", (target, source, Array("u32", ())), (operand,))
    return start.changed(frontend_attributes=frontend_attributes)


def copy_done(name: str, shape: Array, start: str) -> Instruction:
    return instruction(name, "copy-done", shape, (start,))
