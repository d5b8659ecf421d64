"""Sums out of accumulation loops: what every trip adds over the devices is added over the trips first, and then once.

XLA has a pass for it, but that runs when collectives have to be in phases already.
"""

from collections import Counter

from memplan.xla.collectives.cost import REDUCE
from memplan.xla.collectives.writing import Lines, Writer, adds_up, is_row_major, ordered, replaced
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_LIKE_ZERO = ("broadcast", "bitcast", "copy", "reshape", "convert", "transpose")
_MOVING = ("copy", "bitcast", "reshape", "transpose")  # elements, none of which they change
_ONCE = '"known_trip_count":{"n":"1"}'


def hoist_sums(module: Module, on_gpu: bool) -> Module:
    """The module with all-reduces behind the loops whose carries only add them up."""
    writer = Writer(module, lays_out=not on_gpu)
    callers = Counter(name for body in module.values() for op in body.ops.values() for name in op.called)
    for name in module:  # computations come before their callers: inner loops first
        for loop in [op for op in module[name].ops.values() if op.opcode == "while"]:
            if callers[_body(module, loop).name] == 1 and _ONCE not in loop.attributes:
                module = _hoisted(writer, module, name, loop)
    return module


def _body(module: Module, loop: Instruction) -> Computation:
    return module[loop.attribute("body").lstrip("%")]


def _hoisted(writer: Writer, module: Module, name: str, loop: Instruction) -> Module:
    outer, body = module[name], _body(module, loop)
    users = [user for user, _ in outer.uses[loop.name]]
    given = outer.ops[loop.operands[0]]
    if given.opcode != "tuple" or body.root.opcode != "tuple" or loop.root:
        return module
    if any(user.opcode != "get-tuple-element" for user in users):
        return module
    condition = module[loop.attribute("condition").lstrip("%")]
    moved: dict[int, Instruction] = {}
    for number, result in enumerate(body.root.operands):
        added = _added(module, body, body.ops[result], number)
        if added is not None and _is_zero(outer, given.operands[number]) and not _elements(condition, number):
            moved[number] = added
    if not moved:
        return module
    new: dict[str, list[str]] = {}
    for op in moved.values():
        ((reader, _),) = body.uses[op.name]
        terms = [op.operands[0] if name == op.name else name for name in reader.operands]
        new[reader.name] = [reader.line_with(reader.name, terms)]
    module = replaced(module, body, new, {op.name for op in moved.values()})
    behind: dict[str, list[str]] = {}
    for user in users:
        if user.index in moved:
            behind[user.name] = _summed(writer, user, moved[user.index])
    return replaced(module, module[name], behind, set())


def _added(module: Module, body: Computation, result: Instruction, number: int) -> Instruction | None:
    """The all-reduce that a carry of a loop adds to itself, and that nothing else reads; None if it does more."""
    if result.opcode != "add" or len(body.uses[result.name]) != 1:
        return None
    operands = [body.ops[name] for name in result.operands]
    carried = [op for op in operands if op.opcode == "get-tuple-element" and op.index == number]
    sums = [found for op in operands if (found := _all_reduce_behind(body, op)) is not None]
    if len(carried) != 1 or len(sums) != 1 or carried != _elements(body, number):
        return None
    return sums[0] if adds_up(module, sums[0]) and len(body.uses[carried[0].name]) == 1 else None


def _all_reduce_behind(body: Computation, op: Instruction) -> Instruction | None:
    """The all-reduce that an operand is, perhaps with its elements in another order; None if others read it too."""
    dtype = op.result[0].dtype
    while op.opcode in _MOVING and len(body.uses[op.name]) == 1 and is_row_major(op.result[0]):
        op = body.ops[op.operands[0]]
    alone = len(body.uses[op.name]) == 1 and op.name not in ordered(body)
    return op if op.opcode == REDUCE and isinstance(op.shape, Array) and alone and op.shape.dtype == dtype else None


def _elements(body: Computation, number: int) -> list[Instruction | None]:
    """The reads of an element of the state; None for a read of the whole."""
    (state,) = body.parameters.values()
    reads = [user if user.opcode == "get-tuple-element" else None for user, _ in body.uses[state.name]]
    return [user for user in reads if user is None or user.index == number]


def _is_zero(body: Computation, name: str) -> bool:
    op = body.ops[name]
    while op.opcode in _LIKE_ZERO:
        op = body.ops[op.operands[0]]
    return op.opcode == "constant" and "0" in op.attributes and not set(op.attributes) - set("{}(), -.0")


def _summed(writer: Writer, user: Instruction, summed: Instruction) -> list[str]:
    """The element of the loop's result, and its sum under the name that it had."""
    lines = Lines(writer, summed)
    raw = lines.add("trips", user.result[0], "get-tuple-element", user.operands[0], more=f", index={user.index}")
    lines.end(user, REDUCE, raw, more=f", {writer.once_more(summed.attributes)}")
    return lines.made
