"""Runs a small module on all partitions at once, without XLA."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memplan.xla.module import Instruction, Module
from memplan.xla.shapes import Array

Values = NDArray[Any]  # [partitions, *dims]

_ELEMENTWISE = {
    "add": np.add,
    "multiply": np.multiply,
    "divide": np.floor_divide,
    "remainder": np.remainder,
}


def run(module: Module, *arguments: Values) -> list[Values]:
    """The results of the entry on every partition."""
    ops, values = module.entry.ops, dict[str, Values]()
    for op in ops.values():
        if op.opcode != "tuple":
            sources = [ops[name].result[0] for name in op.operands]
            values[op.name] = _Call(
                op, sources, [values[name] for name in op.operands], arguments
            ).value()
            assert values[op.name].shape[1:] == op.result[0].dims, op.name
    return [values[op.name] for op in module.entry.results]


@dataclass(frozen=True)
class _Call:
    op: Instruction
    sources: Sequence[Array]
    given: Sequence[Values]
    arguments: Sequence[Values]  # of the entry

    @property
    def partitions(self) -> int:
        return len(self.arguments[0])

    @property
    def array(self) -> Array:
        return self.op.result[0]

    def value(self) -> Values:
        kind = self.op.opcode
        return (
            _ELEMENTWISE[kind](*self.given)
            if kind in _ELEMENTWISE
            else getattr(self, kind.replace("-", "_"))()
        )

    def parameter(self) -> Values:
        return self.arguments[self.op.parameter_number]

    def partition_id(self) -> Values:
        return np.arange(self.partitions)

    def constant(self) -> Values:
        # of floats only zeros are padded with
        elements = self.op.integers or (0,) * self.array.size
        return np.broadcast_to(
            np.array(elements).reshape(self.array.dims), (self.partitions, *self.array.dims)
        )

    def convert(self) -> Values:
        return self.given[0]

    def reshape(self) -> Values:
        return self.given[0].reshape(self.partitions, *self.array.dims)

    def bitcast(self) -> Values:
        """The same bytes in another shape and layout."""
        before, after = _outermost_first(self.sources[0]), _outermost_first(self.array)
        lying = self.given[0].transpose(0, *(dim + 1 for dim in before))
        shaped = lying.reshape(self.partitions, *(self.array.dims[dim] for dim in after))
        return shaped.transpose(0, *(1 + dim for dim in np.argsort(np.array(after, int))))

    def transpose(self) -> Values:
        return self.given[0].transpose(0, *(dim + 1 for dim in self.op.dimensions))

    def dynamic_slice(self) -> Values:
        slices = []
        for whole, *starts in zip(*self.given, strict=True):
            sides = zip(starts, whole.shape, self.array.dims, strict=True)
            begins = [min(max(int(start), 0), side - part) for start, side, part in sides]
            parts = zip(begins, self.array.dims, strict=True)
            slices.append(whole[tuple(slice(begin, begin + part) for begin, part in parts)])
        return np.stack(slices)

    def all_gather(self) -> Values:
        (dim,) = self.op.dimensions
        return self.in_groups(lambda parts: [np.concatenate(parts, dim)] * len(parts))

    def all_reduce(self) -> Values:
        return self.in_groups(lambda parts: [np.sum(parts, 0)] * len(parts))

    def reduce_scatter(self) -> Values:
        (dim,) = self.op.dimensions
        return self.in_groups(lambda parts: np.split(np.sum(parts, 0), len(parts), dim))

    def in_groups(self, communicate: Callable[[list[Values]], list[Values]]) -> Values:
        results: dict[int, Values] = {}
        for group in self.op.groups(self.partitions):
            results |= dict(
                zip(group, communicate([self.given[0][member] for member in group]), strict=True)
            )
        return np.stack([results[partition] for partition in range(self.partitions)])


def _outermost_first(array: Array) -> list[int]:
    return list(reversed(array.layout.order)) or list(range(len(array.dims)))
