"""A program, or the body of a loop, as operations and values, and which rows of its arrays go together.

Plain data; nothing here knows jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from memplan.hardware.device import Device
from memplan.hardware.roofline import kernel_seconds

Fusion = Literal["view", "elementwise", "reduction", "kernel"]


@dataclass(frozen=True)
class Value:
    """An array."""

    name: str  # readable and unique, for example `conv_general_dilated:41`
    nbytes: int  # bytes when it exists in device memory
    # shape, dtype: as jax prints them
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Op:
    """An equation."""

    name: str  # primitive, for example `conv_general_dilated`
    # inputs, outputs: value ids (indices into `Graph.values`); an input may occur more than once
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float = 0.0  # floating-point operations, multiply and add counted separately
    flops_dtype: str = ""  # operand type whose matrix rate applies; '' for work outside the matrix units
    # how the compiler treats it. `view` costs nothing; `elementwise` fuses into its readers; `reduction` fuses its
    # producers into itself; `kernel` reads and writes memory.
    fusion: Fusion = "kernel"
    along_rows: bool = False  # a reduction along the last axis alone
    # device bytes moved besides inputs and outputs (what a loop reads and writes over and over)
    traffic_nbytes: int = 0
    recomputable: bool = True  # may it run a second time with the same result and no other trace?
    source: str = ""  # `file:line` of the user's code, or ''


@dataclass(frozen=True)
class Graph:
    """A straight-line program: operations in order, and the values that they make and read."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Op id that makes each value; None for what is given."""
        made: list[int | None] = [None] * len(self.values)
        for index, op in enumerate(self.ops):
            for value in op.outputs:
                made[value] = index
        return tuple(made)

    def nbytes(self, value: int) -> int:
        return self.values[value].nbytes


def op_seconds(graph: Graph, op: Op, device: Device) -> float:
    """Seconds of an operation on its own: everything it reads and writes crosses device memory."""
    if op.fusion == "view":
        return 0.0
    nbytes = sum(map(graph.nbytes, op.outputs)) + sum(map(graph.nbytes, dict.fromkeys(op.inputs)))
    return kernel_seconds(op.flops, op.flops_dtype, nbytes + op.traffic_nbytes, device)


Span = tuple[int, int]
"""Rows [low, high)."""


@dataclass(frozen=True)
class Rows:
    """The rows of an operand that rows of a result read along one axis, as a convolution's window does.

    Row `i` of the result reads positions `i * stride - before` up to `reach` further; row `j` of the operand is at
    position `j * dilation`, with nothing between.
    """

    stride: int = 1
    dilation: int = 1
    before: int = 0
    reach: int = 1
    via: Rows | None = None  # the rows are those of another operand, whose rows these are

    def of(self, low: int, high: int) -> Span:
        """The rows that rows [low, high) of the result read: [first, last).

        Never empty: a window between two rows yields the next row, which is then masked.
        """
        if self.via is not None:
            low, high = self.via.of(low, high)
        start, stop = self.window(low, high)
        first, last = -(-start // self.dilation), (stop - 1) // self.dilation + 1
        return first, max(last, first + 1)

    def window(self, low: int, high: int) -> Span:
        """The positions that rows [low, high) of the result (of `via`, where there is one) read."""
        start = low * self.stride - self.before
        return start, start + (high - 1 - low) * self.stride + self.reach

    @property
    def scale(self) -> Fraction:
        """Rows of the operand by rows of the result."""
        own = Fraction(self.stride, self.dilation)
        return own if self.via is None else own * self.via.scale

    def leave(self, made: int, given: int) -> bool:
        """A result of `made` rows reads others than the `given` rows of the operand: its padding."""
        low, high = self.of(0, made)
        return low < 0 or high > given

    def apart(self, made: int, given: int, parts: int) -> bool:
        """Equal parts of the result read, in the same way, equal parts of the operand, each its own alone."""
        own, mine = made // parts, given // parts
        return made * self.scale == given and not any(
            low < part * mine or high > (part + 1) * mine
            for part in range(parts)
            for low, high in [self.of(part * own, (part + 1) * own)]
        )


ALIGNED = Rows()
