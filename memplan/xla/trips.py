"""The trips of a loop whose back end does not say them: XLA:TPU writes no `known_trip_count`."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

_DIRECTION = 63  # the number of a comparison's field, which memplan's messages do not have
_NAMING = ("copy", "bitcast")


def count_trips(
    loop: Any, around: Mapping[int, Any], computations: Mapping[int, Any]
) -> int | None:
    """The trips of a loop that counts from a constant to another by ones; None of other loops.

    Args:
      loop: the message of the loop.
      around: by id, the messages of the instructions around it.
      computations: by id, the messages of the module's computations.
    """
    body, condition = (computations[number] for number in loop.called_computation_ids)
    inside = {op.id: op for op in body.instructions}
    tests = {op.id: op for op in condition.instructions}
    test = tests[condition.root_id]
    if test.opcode != "compare" or _direction(test) != b"LT":
        return None
    counter, bound = (_behind(tests, operand) for operand in test.operand_ids)
    state, results = _behind(around, loop.operand_ids[0]), inside[body.root_id]
    are_tuples = state.opcode == results.opcode == "tuple"
    if counter.opcode != "get-tuple-element" or not are_tuples:
        return None
    index = counter.tuple_index
    first = _constant(_behind(around, state.operand_ids[index]))
    last = _constant(bound)
    step = _behind(inside, results.operand_ids[index])
    if first is None or last is None or step.opcode != "add":
        return None
    added = [_behind(inside, operand) for operand in step.operand_ids]
    counts = any(op.opcode == "get-tuple-element" and op.tuple_index == index for op in added)
    return max(0, last - first) if counts and 1 in map(_constant, added) else None


def _behind(ops: Mapping[int, Any], number: int) -> Any:
    while ops[number].opcode in _NAMING:
        number = ops[number].operand_ids[0]
    return ops[number]


def _constant(op: Any) -> int | None:
    """The value of a constant of type int32."""
    return op.literal.s32s[0] if op.opcode == "constant" and op.literal.s32s else None


def _direction(test: Any) -> bytes:
    fields = (field for field in UnknownFieldSet(test) if field.field_number == _DIRECTION)
    return next((field.data for field in fields), b"")
