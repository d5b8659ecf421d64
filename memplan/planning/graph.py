"""The problem statement: operations, values, lifetimes. Plain data; nothing here knows jax.

Positions are indices into `Graph.ops`; lifetimes are half-open `[first, last + 1)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Fusion = Literal["view", "elementwise", "reduction", "kernel"]
Role = Literal["argument", "constant", "intermediate"]


@dataclass(frozen=True)
class Value:
    """An array of the program.

    Attributes:
      name: readable and unique, for example `conv_general_dilated:41` or `state.params['w']`.
      nbytes: bytes when it exists in device memory.
      shape, dtype: as jax prints them.
      role: where it comes from.
      donated: an argument whose buffer the step may overwrite.
    """

    name: str
    nbytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    role: Role = "intermediate"
    donated: bool = False


@dataclass(frozen=True)
class Op:
    """An equation of the program.

    Attributes:
      name: primitive, for example `conv_general_dilated`.
      inputs, outputs: value ids (indices into `Graph.values`); an input may occur more than once.
      flops: floating-point operations, multiply and add counted separately.
      flops_dtype: operand type whose matrix rate applies; '' for work outside the matrix units.
      fusion: how the compiler treats it. `view` costs nothing and needs no buffer of its own when its reader is
        fused; `elementwise` melts into its readers; `reduction` melts its producers into itself; `kernel` reads and
        writes memory.
      along_rows: a reduction along the last axis alone.
      workspace_nbytes: device bytes needed while it runs, besides inputs and outputs; of a body, all that its own order
        has alive at once.
      bodies: of a loop or a conditional, which need device bytes of their own while it runs.
      communicates: it waits for other devices, and other work need not wait for it.
      crosses_memories: it copies between device and host memory; one side has no device bytes.
      traffic_nbytes: device bytes moved besides inputs and outputs (what a loop reads and writes over and over).
      recomputable: may it run a second time with the same result and no other trace?
      why_not: the reason where it may not.
      source: `file:line` of the user's code, or ''.
      scope: the name stack.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float = 0.0
    flops_dtype: str = ""
    fusion: Fusion = "kernel"
    along_rows: bool = False
    workspace_nbytes: int = 0
    bodies: tuple[Graph, ...] = ()
    communicates: bool = False
    crosses_memories: bool = False
    traffic_nbytes: int = 0
    recomputable: bool = True
    why_not: str = ""
    source: str = ""
    scope: str = ""

    @property
    def where(self) -> str:
        """`name (file:line)` for messages."""
        return f"{self.name} ({self.source})" if self.source else self.name


@dataclass(frozen=True)
class Graph:
    """A straight-line program.

    Attributes:
      values: all values; ids are indices.
      ops: in program order; ids are indices.
      inputs: ids of arguments and constants, in order.
      outputs: ids returned, in order; an id may occur more than once and may be an input.
      fingerprint: identifies the program that a plan belongs to.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str = ""

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Op id that makes each value; None for inputs."""
        made: list[int | None] = [None] * len(self.values)
        for index, op in enumerate(self.ops):
            for value in op.outputs:
                made[value] = index
        return tuple(made)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that read each value, in order, each once."""
        read: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                read[value].append(index)
        return tuple(tuple(ops) for ops in read)

    @cached_property
    def returned(self) -> frozenset[int]:
        return frozenset(self.outputs)

    def nbytes(self, value: int) -> int:
        return self.values[value].nbytes

    def is_passing(self, value: int) -> bool:
        """True for what is neither given nor returned: it comes and goes."""
        return self.values[value].role == "intermediate" and value not in self.returned

    def passing_nbytes(self, value: int) -> int:
        """Device bytes of a value while it lives; inputs and outputs are counted from the beginning."""
        return self.nbytes(value) if self.is_passing(value) else 0

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes of the inputs, which the caller holds during the whole step."""
        return sum(self.values[value].nbytes for value in self.inputs)

    @cached_property
    def reused(self) -> dict[int, int]:
        """Output value -> donated argument whose buffer it takes over (equal shape and dtype, first come)."""
        free: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for value in self.inputs:
            if self.values[value].donated and value not in self.returned:
                key = (self.values[value].shape, self.values[value].dtype)
                free.setdefault(key, []).append(value)
        taken: dict[int, int] = {}
        for value in dict.fromkeys(self.outputs):
            known = self.values[value]
            waiting = free.get((known.shape, known.dtype))
            if known.role == "intermediate" and waiting:
                taken[value] = waiting.pop(0)
        return taken
