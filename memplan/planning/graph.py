"""A loop's body as operations and values. Plain data; nothing here knows jax."""

from __future__ import annotations

from dataclasses import dataclass
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
