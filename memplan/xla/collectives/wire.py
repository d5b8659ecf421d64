"""Sums between hosts in a narrower type: half as many bytes on the slowest links.

Values are sent bit-cast to u16, so that XLA does not widen them. Each device gets the hosts' parts
of its piece, adds them in float32, and sends the sum back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from memplan.hardware.backend import Backend
from memplan.hardware.machine import Groups
from memplan.xla.collectives.cost import EXCHANGE, GATHER
from memplan.xla.collectives.writing import Builder
from memplan.xla.module import Instruction

_DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Wire:
    """A narrower type for sums of float32."""

    dtype: str  # HLO's name

    nbytes: ClassVar[int] = 2  # of an element

    @classmethod
    def named(cls, name: str) -> Wire:
        """The type with this numpy name."""
        return cls(_DTYPES[name])

    def sum(
        self,
        builder: Builder,
        groups: Groups,
        piece: Instruction,
        to_apply: str,
        backend: Backend,
    ) -> Instruction:
        """The sum of a flat piece over the groups.

        Args:
          to_apply: the computation that adds two elements.
        """
        (size,) = piece.result[0].dims
        hosts = len(groups[0])
        rows = builder.reshape("rows", piece, hosts, size // hosts)
        bits = _exchanged(builder, groups, self._bits(builder, rows), backend.exchanges_tuples)
        wide = self._wide(builder, bits)
        zero = builder.scalar("f32", 0)
        summed = builder.add(
            "sum",
            "reduce",
            builder.edit.array("f32", size // hosts),
            wide,
            zero,
            dimensions=[0],
            to_apply=to_apply,
        )
        bits = self._bits(builder, summed)
        shape = builder.edit.array("u16", size)
        bits = builder.collective("collect", GATHER, shape, bits, groups=groups, dimensions=[0])
        return self._wide(builder, bits)

    def _bits(self, builder: Builder, value: Instruction) -> Instruction:
        dims = value.result[0].dims
        shape = builder.edit.array(self.dtype, *dims)
        narrow = builder.add("narrow", "convert", shape, value)
        return builder.add("bits", "bitcast-convert", builder.edit.array("u16", *dims), narrow)

    def _wide(self, builder: Builder, bits: Instruction) -> Instruction:
        dims = bits.result[0].dims
        shape = builder.edit.array(self.dtype, *dims)
        narrow = builder.add("narrow", "bitcast-convert", shape, bits)
        return builder.add("wide", "convert", builder.edit.array("f32", *dims), narrow)


def _exchanged(
    builder: Builder,
    groups: Groups,
    bits: Instruction,
    tuples: bool,
) -> Instruction:
    """Row n of every device of a group on its n-th device; `tuples` as `Wire.sum` has it."""
    shape = bits.shape
    if not tuples:
        return builder.collective("exchange", EXCHANGE, shape, bits, groups=groups, dimensions=[0])
    hosts, part = bits.result[0].dims
    row_shape = builder.edit.array("u16", 1, part)
    bounds = [[(row, row + 1, 1), (0, part, 1)] for row in range(hosts)]
    sent = [builder.add("row", "slice", row_shape, bits, slices=box) for box in bounds]
    received = builder.exchanged(groups, sent)
    return builder.add("rows", "concatenate", shape, *received, dimensions=[0])
