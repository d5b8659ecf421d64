"""A program or loop body as operations and values, and the rows of its arrays that correspond.

Without jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from memplan.hardware.device import Device
from memplan.hardware.efficiency import PRODUCT, MatrixShape
from memplan.hardware.library_calls import LibraryCall
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
    # operand type whose matrix rate applies; '' for work outside the matrix units
    flops_dtype: str = ""
    # how the compiler treats it. `view` costs nothing; `elementwise` fuses into its readers;
    # `reduction` fuses its producers into itself; `kernel` reads and writes memory
    fusion: Fusion = "kernel"
    along_rows: bool = False  # is it a reduction along the last axis alone?
    # bytes of device memory traffic beyond inputs and outputs, such as a loop's repeated reads
    traffic_nbytes: int = 0
    recomputable: bool = True  # may it run again, with the same result and no side effects?
    source: str = ""  # `file:line` of the user's code, or ''
    shape: MatrixShape = PRODUCT  # of its matrix work
    library_calls: tuple[LibraryCall, ...] = ()  # factorizations, sorts, Fourier transforms


@dataclass(frozen=True)
class Graph:
    """A straight-line program: operations in order, and their values."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Id of the op that writes each value; None for inputs."""
        producers: list[int | None] = [None] * len(self.values)
        for number, op in enumerate(self.ops):
            for value in op.outputs:
                producers[value] = number
        return tuple(producers)

    def nbytes(self, value: int) -> int:
        return self.values[value].nbytes

    def touched_nbytes(self, op: Op) -> int:
        """Bytes that an operation reads and writes."""
        return sum(map(self.nbytes, {*op.inputs, *op.outputs}))


def op_seconds(graph: Graph, op: Op, device: Device) -> float:
    """Seconds of an operation that reads and writes all its values in device memory."""
    if op.fusion == "view":
        return 0.0
    nbytes = sum(map(graph.nbytes, op.outputs)) + sum(map(graph.nbytes, dict.fromkeys(op.inputs)))
    moved_nbytes = nbytes + op.traffic_nbytes
    return kernel_seconds(
        op.flops, op.flops_dtype, moved_nbytes, device, op.shape, op.library_calls
    )


Span = tuple[int, int]
"""Rows [low, high)."""


@dataclass(frozen=True)
class Rows:
    """The rows of an operand that rows of a result read along one axis, as in a convolution.

    Row `i` of the result reads `reach` positions from `i * stride - before`. Row `j` of the operand
    is at position `j * dilation`; the positions between rows are empty.
    """

    stride: int = 1
    dilation: int = 1
    before: int = 0
    reach: int = 1
    via: Rows | None = None  # applied first: rows of the result -> rows of the operand between

    def of(self, low: int, high: int) -> Span:
        """The rows that rows [low, high) of the result read, as [first, end).

        Never empty: a window between two rows yields the next row, which is then masked.
        """
        if self.via is not None:
            low, high = self.via.of(low, high)
        start, stop = self.window(low, high)
        first = -(-start // self.dilation)
        end = (stop - 1) // self.dilation + 1
        return first, max(end, first + 1)

    def window(self, low: int, high: int) -> Span:
        """The positions that rows [low, high) of the result read.

        With `via`, they are positions of the operand between.
        """
        start = low * self.stride - self.before
        return start, start + (high - 1 - low) * self.stride + self.reach

    @property
    def scale(self) -> Fraction:
        """Rows of the operand per row of the result."""
        own = Fraction(self.stride, self.dilation)
        return own if self.via is None else own * self.via.scale

    def reads_padding(self, result_rows: int, operand_rows: int) -> bool:
        """Does a result of so many rows read outside of an operand of so many rows?"""
        low, high = self.of(0, result_rows)
        return low < 0 or high > operand_rows


ALIGNED = Rows()
