"""The planning problem: kernels in order, and the buffers that they write and read. Only types.

Times are positions in a sequence of runs; a buffer is live from the run that writes it to the last that reads it, both
included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

GPU_ALIGNMENT = 256  # bytes: XLA:GPU aligns every buffer so
POINTER_BYTES = 8  # per element of a tuple's table


class Where(Enum):
    """Where a value is while no kernel reads it."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTE = "recompute"  # nowhere: it is computed again


@dataclass(frozen=True, slots=True)
class Pin:
    """The user's word about the values of this name (`jax.ad_checkpoint.checkpoint_name`)."""

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

    Attributes:
      name: of the instruction and, for a tuple, the leaf: `fusion.3{1}`.
      maker: number of the kernel that writes it; None for arguments and constants.
      place: number of the first buffer that must share its place, because it is updated in place or carried by a
        loop; its own number if there is none.
      pin: the user's word about it.
    """

    name: str
    nbytes: int
    role: Role
    maker: int | None
    place: int
    pin: Pin | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel or a block, in the module's order.

    Attributes:
      reads, writes: numbers of buffers.
      may_alias: output -> inputs whose buffer it may take at their last read.
      may_alias_elements: the same for elements of a tuple and results of asynchronous pairs, in buffers of arguments
        and outputs.
      seconds: of one run.
      block: number of the kernel that stands for what contains it, and runs after it: a loop, a called computation, a
        conditional, the end of a branch.
      recomputable: it has no effect but its results, and updates nothing in place.
      trips: of a loop: how often its body runs.
      started_by: of the end of an asynchronous pair: number of the kernel that starts it, and writes its results. What
        runs again is the whole pair.
      is_boundary: it begins or ends a computation, and is no kernel. Nothing crosses it.
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
      donated: arguments that may be overwritten, by an output or by others.
      tables_nbytes: pointers of tuples, in addition to the buffers.
      alignment: bytes of which every buffer's offset is a multiple.
    """

    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int]
    tables_nbytes: int = 0
    alignment: int = GPU_ALIGNMENT

    @cached_property
    def returned(self) -> frozenset[int]:
        return frozenset(self.outputs)

    @cached_property
    def places(self) -> Mapping[int, tuple[int, ...]]:
        """First buffer of each place -> all that share it, itself included."""
        found: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            found.setdefault(buffer.place, []).append(number)
        return {place: tuple(numbers) for place, numbers in found.items()}

    @cached_property
    def moves_pinned(self) -> bool:
        """Does a pin ask for a plan? What stays on the device does not."""
        return any(buffer.pin is not None and buffer.pin.where is not Where.DEVICE for buffer in self.buffers)

    @cached_property
    def times(self) -> tuple[int, ...]:
        """How often each kernel runs in a step: once, and inside a loop once per trip."""
        return tuple(
            math.prod(self.kernels[block].trips for block in self.blocks_around(n)) for n in range(len(self.kernels))
        )

    def is_pinned(self, buffer: int, *where: Where) -> bool:
        """Is a buffer pinned to one of these?"""
        pin = self.buffers[buffer].pin
        return pin is not None and pin.where in where

    def with_seconds(self, seconds: Mapping[str, float]) -> Problem:
        """The problem with these seconds, by kernel's name; 0 for all others."""
        kernels = (replace(one, seconds=seconds.get(one.name, 0.0)) for one in self.kernels)
        return replace(self, kernels=tuple(kernels))

    def with_bodies(self, units: Iterable[int]) -> list[int]:
        """Kernels of the entry in this order, what is inside of a block right before it."""
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
