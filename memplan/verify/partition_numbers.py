"""Integers of a computation that follow from the number of the partition, on every partition."""

import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from memplan.xla.module import Instruction
from memplan.xla.shapes import Array

Operator = Callable[[np.ndarray, np.ndarray], np.ndarray]

_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"})
_LARGEST = 1 << 16  # elements: tables of partitions have no more
_BINARY: Mapping[str, Operator] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
# HLO rounds to zero, numpy down: only for operands that are not negative.
_DIVISIONS: Mapping[str, Operator] = {
    "divide": operator.floordiv,
    "remainder": operator.mod,
}
_SHIFTS: Mapping[str, Operator] = {
    "shift-left": operator.lshift,
    "shift-right-logical": operator.rshift,
}


class PartitionNumbers:
    """Integers of a computation: name -> an array with one row for every partition."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._values: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray | None:
        return self._values.get(name)

    def read(self, op: Instruction) -> None:
        """Note the value of the next instruction, if it follows from the partition's number."""
        shape = op.shape
        if not isinstance(shape, Array) or shape.dtype not in _INTEGERS or shape.size > _LARGEST:
            return
        if not all(name in self._values for name in op.operands):
            return
        operands = [self._values[name] for name in op.operands]
        if (value := self._value(op, shape, operands)) is not None:
            rows = (self._partitions, *shape.dims)
            self._values[op.name] = np.broadcast_to(value, rows).astype(shape.numpy_name)

    def _value(
        self,
        op: Instruction,
        shape: Array,
        operands: Sequence[np.ndarray],
    ) -> np.ndarray | None:
        if op.opcode == "partition-id":
            return np.arange(self._partitions)
        if op.opcode == "constant":
            return _literal(op, shape)
        if op.opcode in ("convert", "reshape", "copy"):
            return operands[0].reshape(self._partitions, *shape.dims)
        if op.opcode == "broadcast":
            ones = [1] * len(shape.dims)
            is_scalar = operands[0][0].size == 1
            return operands[0].reshape(self._partitions, *ones) if is_scalar else None
        if op.opcode == "clamp":
            low, value, high = operands
            return np.clip(value, low, high) if low.shape == value.shape == high.shape else None
        if op.opcode == "dynamic-slice":
            return self._slice(op, operands)
        if op.opcode in _BINARY:
            return _BINARY[op.opcode](*operands)
        return _of_natural_numbers(op, shape, operands)

    def _slice(self, op: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray:
        table, *starts = operands
        rows: list[np.ndarray] = []
        for partition in range(self._partitions):
            row = table[partition]
            for dim, (size, numbers) in enumerate(zip(op.slice_sizes, starts, strict=True)):
                start = clamped(numbers[partition], row.shape[dim], size)
                row = row.take(range(start, start + size), axis=dim)
            rows.append(row)
        return np.stack(rows)


def clamped(start: np.ndarray, whole: int, size: int) -> int:
    """The position where a dynamic slice of a size starts that names this start."""
    return min(max(int(start), 0), whole - size)


def _of_natural_numbers(
    op: Instruction,
    shape: Array,
    operands: Sequence[np.ndarray],
) -> np.ndarray | None:
    """A quotient, a remainder or a shift, where numpy computes the same as HLO."""
    if op.opcode in _DIVISIONS:
        dividend, divisor = operands
        same = dividend.min() >= 0 and divisor.min() >= 1
        return _DIVISIONS[op.opcode](dividend, divisor) if same else None
    if op.opcode in _SHIFTS:
        number, bits = operands
        same = number.min() >= 0 and bits.min() >= 0 and bits.max() < shape.bits
        return _SHIFTS[op.opcode](number, bits) if same else None
    return None


def _literal(op: Instruction, shape: Array) -> np.ndarray | None:
    numbers = op.integers
    if numbers is None or len(numbers) != shape.size:
        return None
    return np.array(numbers).reshape(1, *shape.dims)
