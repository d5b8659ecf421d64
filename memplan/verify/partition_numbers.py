"""Integers of a computation that follow from the number of the partition, on every partition."""

import math
import operator
import re
from collections.abc import Callable, Mapping

import numpy as np

from memplan.xla.module import Instruction
from memplan.xla.shapes import Array

_INTEGER = re.compile(r"[su](?:8|16|32|64)$")
_LARGEST = 1 << 16  # elements: tables of partitions have no more
_SIZES = re.compile(r"dynamic_slice_sizes=\{([\d,]*)\}")
_BINARY: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
_OF_POSITIVES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # HLO rounds to zero, numpy down
    "divide": operator.floordiv,
    "remainder": operator.mod,
    "shift-left": operator.lshift,
    "shift-right-logical": operator.rshift,
}


class PartitionNumbers:
    """Known integers of a computation: name -> an array with one row for every partition."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._known: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray | None:
        return self._known.get(name)

    def read(self, op: Instruction) -> None:
        """Note the value of the next instruction, if it is known."""
        shape = op.shape
        if not isinstance(shape, Array) or not _INTEGER.match(shape.dtype) or shape.size > _LARGEST:
            return
        given = [self._known[name] for name in op.operands if name in self._known]
        if len(given) == len(op.operands) and (value := self._value(op, shape, given)) is not None:
            rows = (self._partitions, *shape.dims)
            self._known[op.name] = np.broadcast_to(value, rows).astype(shape.numpy_name)

    def _value(self, op: Instruction, shape: Array, given: list[np.ndarray]) -> np.ndarray | None:
        if op.opcode == "partition-id":
            return np.arange(self._partitions)
        if op.opcode == "constant":
            return _literal(op, shape)
        if op.opcode in ("convert", "reshape", "copy"):
            return given[0].reshape(self._partitions, *shape.dims)
        if op.opcode == "broadcast":
            return given[0].reshape(self._partitions, *[1] * len(shape.dims)) if given[0][0].size == 1 else None
        if op.opcode == "clamp":
            return np.clip(given[1], given[0], given[2]) if len({one.shape for one in given}) == 1 else None
        if op.opcode == "dynamic-slice":
            return self._slice(op, given)
        if op.opcode in _BINARY:
            return _BINARY[op.opcode](*given)
        if op.opcode in _OF_POSITIVES and given[0].min() >= 0 and given[1].min() >= ("shift" not in op.opcode):
            fits = "shift" not in op.opcode or given[1].max() < shape.bits
            return _OF_POSITIVES[op.opcode](*given) if fits else None
        return None

    def _slice(self, op: Instruction, given: list[np.ndarray]) -> np.ndarray | None:
        sizes = [int(size) for size in _SIZES.findall(op.attributes)[0].split(",") if size]
        table, rows = given[0], []
        for partition in range(self._partitions):
            one = table[partition]
            for dim, (size, at) in enumerate(zip(sizes, given[1:], strict=True)):
                one = one.take(range(start := clamped(at[partition], one.shape[dim], size), start + size), axis=dim)
            rows.append(one)
        return np.stack(rows)


def clamped(start: np.ndarray, whole: int, size: int) -> int:
    """Where a dynamic slice of this size starts that is asked to start there."""
    return min(max(int(start), 0), whole - size)


def _literal(op: Instruction, shape: Array) -> np.ndarray | None:
    numbers = re.findall(r"-?\d+", op.attributes)
    if "..." in op.attributes or len(numbers) != math.prod(shape.dims):
        return None
    return np.array([int(number) for number in numbers], shape.numpy_name).reshape(1, *shape.dims)
