"""The planning problem: kernels in order, and the buffers that they write and read. Only types.

Times are positions in a sequence of runs. A buffer is live from the run that writes it to the last
run that reads it, both included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from memplan.hardware.backend import GPU

POINTER_BYTES = 8  # per element of a tuple's table


class Where(Enum):
    """Where a value is while no kernel reads it."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTE = "recompute"  # in no memory: it is computed again


@dataclass(frozen=True, slots=True)
class Pin:
    """The user's decision about the values of a name (`jax.ad_checkpoint.checkpoint_name`)."""

    name: str
    where: Where


class Role(Enum):
    TEMPORARY = "temporary"
    ARGUMENT = "argument"
    OUTPUT = "output"
    CONSTANT = "constant"
    ON_HOST = "on host"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that one kernel writes, or that the caller passes.

    Buffers that are updated in place or carried by a loop must alias: they form an *alias set*.

    Attributes:
      name: of the instruction and, for a tuple, the leaf: `fusion.3{1}`.
      maker: number of the kernel that writes it; None for arguments and constants.
      alias_set: number of the first buffer of its alias set; its own number if it is that one.
      pin: the user's decision about it, if there is one.
    """

    name: str
    nbytes: int
    role: Role
    maker: int | None
    alias_set: int
    pin: Pin | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel or a block, in the module's order.

    Attributes:
      reads, writes: numbers of buffers.
      may_alias: output -> inputs whose buffer it may reuse at their last read.
      may_alias_elements: the same for elements of tuples and for results of asynchronous pairs.
        They may reuse only buffers of arguments and outputs.
      seconds: of one run.
      block: number of the kernel that contains it and runs after it: a loop, a called computation,
        a conditional, the end of a branch. None: it is in the entry.
      recomputable: it has no effect but its results, and updates nothing in place.
      trips: of a loop: how often its body runs.
      started_by: of the end of an asynchronous pair: number of the kernel that starts the pair and
        writes its results. A recomputation runs the whole pair.
      is_boundary: it is no kernel, but the first or the last position of a computation. No kernel
        may cross it.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    may_alias: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    may_alias_elements: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    block: int | None = None
    recomputable: bool = True
    trips: int = 1
    started_by: int | None = None
    is_boundary: bool = False


@dataclass(frozen=True)
class Problem:
    """A step as kernels.

    Attributes:
      outputs: buffers of the step's results, in order.
      donated: arguments whose memory outputs and temporaries may reuse.
      tables_nbytes: pointers of tuples, in addition to the buffers.
      alignment: bytes of which every buffer's offset is a multiple.
      vector_memory_bytes: of a memory in the device's cores, where temporaries may be instead.
    """

    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int]
    tables_nbytes: int = 0
    alignment: int = GPU.alignment
    vector_memory_bytes: int = 0

    @cached_property
    def returned(self) -> frozenset[int]:
        return frozenset(self.outputs)

    @cached_property
    def alias_sets(self) -> Mapping[int, tuple[int, ...]]:
        """First buffer of each alias set -> all its members."""
        members: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            members.setdefault(buffer.alias_set, []).append(number)
        return {first: tuple(numbers) for first, numbers in members.items()}

    @cached_property
    def moves_pinned(self) -> bool:
        """Does any pin require a plan? Pins to the device do not."""
        pins = (buffer.pin for buffer in self.buffers)
        return any(pin is not None and pin.where is not Where.DEVICE for pin in pins)

    @cached_property
    def times(self) -> tuple[int, ...]:
        """How often each kernel runs in a step: once, and inside a loop once per trip."""
        return tuple(
            math.prod(self.kernels[block].trips for block in self.blocks_around(number))
            for number in range(len(self.kernels))
        )

    def is_pinned(self, buffer: int, *where: Where) -> bool:
        """Is a buffer pinned to one of these?"""
        pin = self.buffers[buffer].pin
        return pin is not None and pin.where in where

    def with_seconds(self, seconds: Mapping[str, float]) -> Problem:
        """The problem with these seconds, by name of the kernel; 0 for kernels without an entry."""
        kernels = self.kernels
        timed = (replace(kernel, seconds=seconds.get(kernel.name, 0.0)) for kernel in kernels)
        return replace(self, kernels=tuple(timed))

    def with_bodies(self, units: Iterable[int]) -> list[int]:
        """Kernels in this order of top-level units; a body immediately precedes its block."""
        inside: dict[int, list[int]] = {}
        for number in range(len(self.kernels)):
            for outermost in list(self.blocks_around(number))[-1:]:
                inside.setdefault(outermost, []).append(number)
        return [number for unit in units for number in (*inside.get(unit, ()), unit)]

    def blocks_around(self, number: int) -> Iterator[int]:
        """The blocks that contain a kernel, the innermost first."""
        while (block := self.kernels[number].block) is not None:
            yield block
            number = block
