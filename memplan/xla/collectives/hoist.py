"""Hoist all-reduces out of accumulation loops: accumulate locally, reduce once.

XLA has a pass for it, but that runs when collectives have to be in phases already.
"""

from collections import Counter
from collections.abc import Sequence

from memplan.xla.collectives.cost import REDUCE
from memplan.xla.collectives.writing import Builder, CollectiveEdit, adds_up, ordered
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

# Zeros stay zeros through these instructions.
_LIKE_ZERO = ("broadcast", "bitcast", "copy", "reshape", "convert", "transpose")
# These instructions move elements and change none.
_MOVING = ("copy", "bitcast", "reshape", "transpose")


def hoist_sums(module: Module) -> Module:
    """The module with all-reduces behind the loops whose carries only add them up."""
    edit = CollectiveEdit(module)
    bodies = module.values()
    callers = Counter(name for body in bodies for op in body.ops.values() for name in op.called)
    for name in module:  # computations come before their callers: inner loops first
        for loop in [op for op in edit[name].ops.values() if op.opcode == "while"]:
            if callers[loop.body] == 1 and loop.trip_count != 1:
                _hoist(module, edit, name, loop)
    return edit.module


def _hoist(module: Module, edit: CollectiveEdit, name: str, loop: Instruction) -> None:
    """Hoist the all-reduces of one loop of a computation."""
    outer = edit[name]
    body = edit[loop.body]
    users = [user for user, _ in outer.uses[loop.name]]
    initial = outer.ops[loop.operands[0]]
    if initial.opcode != "tuple" or body.root.opcode != "tuple" or loop.root:
        return
    if any(user.opcode != "get-tuple-element" for user in users):
        return
    condition = edit[loop.condition]
    hoisted: dict[int, Instruction] = {}  # by the element of the loop's state
    for number, result in enumerate(body.root.operands):
        collective = _accumulated(module, body, body.ops[result], number)
        if collective is None or not _is_zero(outer, initial.operands[number]):
            continue
        if not _reads(condition, number):
            hoisted[number] = collective
    if not hoisted:
        return
    readers: dict[str, Sequence[Instruction]] = {}
    for op in hoisted.values():
        ((reader, _),) = body.uses[op.name]
        readers[reader.name] = [reader.with_operands({op.name: op.operands[0]})]
    edit.splice(body, readers, {op.name for op in hoisted.values()})
    read_sums = (user for user in users if user.index in hoisted)
    sums = {user.name: _summed(edit, loop, user, hoisted[user.index]) for user in read_sums}
    edit.splice(edit[name], sums)


def _accumulated(
    module: Module,
    body: Computation,
    result: Instruction,
    number: int,
) -> Instruction | None:
    """The all-reduce that a carry of a loop adds to itself, and that nothing else reads.

    None if the loop does more with the carry.
    """
    if result.opcode != "add" or len(body.uses[result.name]) != 1:
        return None
    operands = [body.ops[name] for name in result.operands]
    carries = [op for op in operands if op.opcode == "get-tuple-element" and op.index == number]
    collectives = (_all_reduce_behind(body, op) for op in operands)
    sums = [collective for collective in collectives if collective is not None]
    if len(carries) != 1 or len(sums) != 1 or carries != _reads(body, number):
        return None
    if not adds_up(module, sums[0]) or len(body.uses[carries[0].name]) != 1:
        return None
    return sums[0]


def _all_reduce_behind(body: Computation, op: Instruction) -> Instruction | None:
    """The all-reduce that an operand is, perhaps with its elements in another order.

    None if it is none, or if the sum has other readers.
    """
    dtype = op.result[0].dtype
    while op.opcode in _MOVING and len(body.uses[op.name]) == 1 and op.result[0].is_row_major:
        op = body.ops[op.operands[0]]
    if op.opcode != REDUCE or not isinstance(op.shape, Array) or op.shape.dtype != dtype:
        return None
    return op if len(body.uses[op.name]) == 1 and op.name not in ordered(body) else None


def _reads(body: Computation, number: int) -> list[Instruction | None]:
    """The reads of an element of a loop's state; None for a read of the whole state."""
    (state,) = body.parameters.values()
    users = [user for user, _ in body.uses[state.name]]
    reads = [user if user.opcode == "get-tuple-element" else None for user in users]
    return [read for read in reads if read is None or read.index == number]


def _is_zero(body: Computation, name: str) -> bool:
    op = body.ops[name]
    while op.opcode in _LIKE_ZERO:
        op = body.ops[op.operands[0]]
    return op.is_zero


def _summed(
    edit: CollectiveEdit,
    loop: Instruction,
    user: Instruction,
    collective: Instruction,
) -> Sequence[Instruction]:
    """The element of the loop's result, and its sum under the name that the element had."""
    builder = Builder(edit, collective, collective)
    shape = user.result[0]
    element = builder.add("trips", "get-tuple-element", shape, loop, index=user.index)
    builder.end_by_sum(user, collective, element)
    return builder.ops
