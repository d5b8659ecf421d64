"""Sums between hosts in a narrower type: half as many bytes on the slowest links.

Bits travel, which nothing widens on the way: each device gets the hosts' parts of its piece, adds them in float32, and
sends the sum back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memplan.hardware.machine import Groups
from memplan.xla.collectives.writing import Lines

_NAMES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "f16"}
_LEAST_NBYTES = 16 << 10  # of a piece: below, the latency of two collectives is more than the bytes are worth


@dataclass(frozen=True)
class Wire:
    """A narrower type for sums of float32."""

    dtype: str  # HLO's name

    @classmethod
    def of(cls, name: str | None, dtype: str) -> Wire | None:
        """The type called so, for sums of this one; None where they travel as they are."""
        return cls(_NAMES[name]) if name is not None and dtype == "f32" else None

    def pays(self, size: int) -> bool:
        """Is it worth while for a piece of so many elements?"""
        return 4 * size >= _LEAST_NBYTES

    def sum(self, lines: Lines, groups: Groups, value: str, size: int, adds: str, tuples: bool) -> str:
        """The sum of a flat piece over the groups.

        Args:
          adds: the attribute that names the computation which adds.
          tuples: an all-to-all takes as many operands as a group has devices, as XLA:CPU wants it.
        """
        hosts, array = len(groups[0]), lines.writer.array
        part = size // hosts
        rows = lines.reshape("rows", value, "f32", hosts, part)
        bits = self._bits(lines, rows, hosts, part)
        if tuples:
            cuts = [f", slice={{[{row}:{row + 1}], [0:{part}]}}" for row in range(hosts)]
            given = [lines.add("row", array("u16", 1, part), "slice", bits, more=cut) for cut in cuts]
            got = lines.exchanged(array("u16", 1, part), groups, given)
            bits = lines.add("rows", array("u16", hosts, part), "concatenate", *got, more=", dimensions={0}")
        else:
            more = ", dimensions={0}"
            bits = lines.collective("exchange", "all-to-all", array("u16", hosts, part), groups, bits, more=more)
        wide = self._wide(lines, bits, hosts, part)
        zero = lines.scalar("f32", 0)
        summed = lines.add("sum", array("f32", part), "reduce", wide, zero, more=f", dimensions={{0}}{adds}")
        bits = self._bits(lines, summed, part)
        more = ", dimensions={0}"
        return self._wide(
            lines, lines.collective("collect", "all-gather", array("u16", size), groups, bits, more=more), size
        )

    def _bits(self, lines: Lines, value: str, *dims: int) -> str:
        narrow = lines.add("narrow", lines.writer.array(self.dtype, *dims), "convert", value)
        return lines.add("bits", lines.writer.array("u16", *dims), "bitcast-convert", narrow)

    def _wide(self, lines: Lines, bits: str, *dims: int) -> str:
        narrow = lines.add("narrow", lines.writer.array(self.dtype, *dims), "bitcast-convert", bits)
        return lines.add("wide", lines.writer.array("f32", *dims), "convert", narrow)
