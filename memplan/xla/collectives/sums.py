"""All-reduces over hosts, in the phases that cost least and in buckets.

Each byte passes a host's link once: what the devices of a host have is added there first, in parts, and only these go
to other hosts (Cho et al., PowerAI DDL, arXiv:1708.02188).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memplan.hardware.collectives import Phase, cheapest
from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.cost import REDUCE
from memplan.xla.collectives.groups import replica_groups
from memplan.xla.collectives.wire import Wire
from memplan.xla.collectives.writing import Lines, Writer, adds_by, adds_up, is_row_major, ordered, replaced, waits_for
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

# Of an MLP with 128 MiB of gradients on 2 x 4 A100: 5.74 ms with 16 MiB, 5.70 with 25, 5.52 with 32, 5.91 with 64.
_BUCKET_NBYTES = 32 << 20
_HEAVY = frozenset({"custom-call", "while", "conditional", "call", "sort", "cholesky", "triangular-solve", "fft"})


@dataclass(frozen=True)
class _Sum:
    """An array that is summed over groups of partitions.

    Attributes:
      op: gives the sum: an all-reduce, or an element of one of several arrays.
      ready: FLOPs of the longest way to what is added.
      depth: sums on the longest way to it; -1 if no other sum needs it, and it may wait.
    """

    op: Instruction
    operand: str
    groups: Groups
    ready: float
    depth: int

    @property
    def array(self) -> Array:
        return self.op.result[0]


def sums_in_phases(module: Module, machine: Machine, on_gpu: bool, wire: str | None = None) -> Module:
    """The module with all-reduces over hosts in phases.

    Args:
      wire: the type in which sums of float32 travel between hosts, "bfloat16" or "float16"; None is their own.
    """
    writer = Writer(module, lays_out=not on_gpu)
    for name in module:
        body = module[name]
        new: dict[str, Sequence[str]] = {}
        taken: set[str] = set()
        for bucket in _buckets(module, body, machine):
            lines = _written(writer, machine, bucket, on_gpu, wire)
            if lines:
                new |= {one.op.name: () for one in bucket}
                new[bucket[0].op.name] = lines
                taken |= {one.op.operands[0] for one in bucket if one.op.opcode == "get-tuple-element"}
        if new:
            module = replaced(module, body, new | _left_over(writer, body, taken, new), taken)
    return module


def _left_over(
    writer: Writer, body: Computation, taken: Collection[str], new: Collection[str]
) -> dict[str, Sequence[str]]:
    """Of all-reduces of several arrays that are taken apart: sums that stay as they are, each by itself."""
    found: dict[str, Sequence[str]] = {}
    for op in (op for op in body.ops.values() if op.name in taken):  # channels in the same order on every host
        for user, _ in body.uses[op.name]:
            if user.name not in new:
                lines = Lines(writer, op)
                lines.end(user, REDUCE, op.operands[user.index], more=f", {writer.once_more(op.attributes)}")
                found[user.name] = lines.made
    return found


def _buckets(module: Module, body: Computation, machine: Machine) -> Iterator[list[_Sum]]:
    """Sums that travel together: none of them needs another.

    Sums that nothing heavy waits for go with those that are ready about then; sums that are waited for, such as batch
    statistics, with those that are ready at the same time.
    """
    waiting: dict[object, list[_Sum]] = defaultdict(list)
    for one in _sums(module, body, machine):
        at = one.ready if one.depth >= 0 else None
        waiting[one.array.dtype, one.groups, one.depth, at].append(one)
    for found in waiting.values():
        bucket, nbytes = list[_Sum](), 0
        for one in sorted(found, key=lambda one: one.ready):
            if bucket and nbytes + one.array.nbytes > _BUCKET_NBYTES:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(one)
            nbytes += one.array.nbytes
        yield bucket


def _sums(module: Module, body: Computation, machine: Machine) -> Iterator[_Sum]:
    """Arrays that are added over several hosts, and of which no device needs just a part."""
    added = list(_all_reduces(module, body))
    if not added:
        return
    reduces = {name for op, _ in added for name in (op.name, *op.operands[:1] * (op.opcode != REDUCE))}
    flops = {op.name: matrix_flops(module, body, op) for op in body.ops.values()}
    ready: dict[str, float] = {}
    depth: dict[str, int] = {}
    for op in body.ops.values():
        before = waits_for(op)
        ready[op.name] = max(map(ready.__getitem__, before), default=0.0) + flops[op.name]
        depth[op.name] = max(map(depth.__getitem__, before), default=0) + (op.opcode == REDUCE)
    needed: set[str] = set()  # by something heavy, or another sum
    for op in reversed(list(body.ops.values())):
        if op.name in needed or op.name in reduces or op.opcode in _HEAVY or flops[op.name]:
            needed.update(waits_for(op))
    hosts = machine.hosts()
    for op, operand in added:
        groups = replica_groups(op.attributes, len(machine.devices))
        over_hosts = any(len({hosts[one] for one in group}) > 1 for group in groups)
        if over_hosts and not _is_scattered(body, op) and _is_plain(op.result[0]):
            waits = op.name not in needed and not op.root
            yield _Sum(op, operand, groups, ready[operand], -1 if waits else depth[operand])


def _all_reduces(module: Module, body: Computation) -> Iterator[tuple[Instruction, str]]:
    """All-reduces that add, and what they add; one of several arrays by its elements."""
    kept = ordered(body)
    for op in body.ops.values():
        if op.opcode != REDUCE or op.name in kept or not adds_up(module, op):
            continue
        if isinstance(op.shape, Array):
            yield op, op.operands[0]
            continue
        users = [user for user, _ in body.uses[op.name]]
        indices = {user.index for user in users if user.opcode == "get-tuple-element"}
        if not op.root and len(indices) == len(users) and kept.isdisjoint(user.name for user in users):
            for user in users:
                yield replace(user, attributes=f"{user.attributes}, {op.attributes}"), op.operands[user.index]


def _is_plain(array: Array) -> bool:
    """Can its elements lie behind those of others, in their order, with zeros behind them?"""
    return array.size > 0 and array.bits >= 8 and array.dtype[0] in "bfsu" and is_row_major(array)


def _is_scattered(body: Computation, op: Instruction) -> bool:
    """XLA makes a reduce-scatter of it, as every reader takes its own part."""
    users = [user for user, _ in body.uses[op.name]]
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


@dataclass(frozen=True)
class _Step:
    """A phase, and its groups."""

    phase: Phase
    groups: Groups

    @property
    def size(self) -> int:
        return len(self.groups[0])


def _written(writer: Writer, machine: Machine, bucket: Sequence[_Sum], on_gpu: bool, wire: str | None) -> Sequence[str]:
    """The lines of a bucket; none where it stays as XLA has it. Only a last phase between hosts is narrow."""
    groups, grid = bucket[0].groups, machine.grid(bucket[0].groups)
    links = machine.links(groups)
    if grid is None:
        return ()
    levels = {axis.name: level for level, axis in enumerate(links.axes)}
    phases = _outermost_last(cheapest(links, sum(one.array.nbytes for one in bucket)), levels)
    steps = [_Step(phase, grid.along({levels[name] for name in phase.axes})) for phase in phases]
    narrow = Wire.of(wire, bucket[0].array.dtype)
    inside = links.axes[-1].name in phases[-1].axes
    if narrow is not None and (inside or not narrow.pays(_size(bucket) // _parts(steps))):
        narrow = None
    if len(phases) == 1 and len(bucket) == 1 and narrow is None:
        return ()
    lines = Lines(writer, bucket[0].op)
    whole = _together(lines, bucket, _parts(steps) * (steps[-1].size if narrow else 1))
    summed = _Reduction(lines, bucket[0], on_gpu, narrow).run(steps, *whole)
    _apart(lines, bucket, summed, whole[1])
    return lines.made


def _outermost_last(phases: Sequence[Phase], levels: Mapping[str, int]) -> Sequence[Phase]:
    """Phases that take as long, as all-reduces behind one another do in any order."""
    return sorted(
        phases, key=lambda one: (not one.scatters, 0 if one.scatters else -min(map(levels.__getitem__, one.axes)))
    )


def _size(bucket: Sequence[_Sum]) -> int:
    return sum(one.array.size for one in bucket)


def _parts(steps: Sequence[_Step]) -> int:
    """Into how many parts a sum is cut until the last phase."""
    return math.prod(step.size for step in steps if step.phase.scatters)


def _together(lines: Lines, bucket: Sequence[_Sum], multiple: int) -> tuple[str, int]:
    """The arrays of a bucket one behind the other, and the number of elements, which is a multiple of this one."""
    writer, dtype = lines.writer, bucket[0].array.dtype
    flat = [lines.reshape("flat", one.operand, dtype, one.array.size) for one in bucket]
    size = _size(bucket)
    (whole, *more) = flat
    if more:
        whole = lines.add("bucket", writer.array(dtype, size), "concatenate", *flat, more=", dimensions={0}")
    if rest := -size % multiple:
        zero = lines.scalar(dtype, 0)
        size += rest
        whole = lines.add("padded", writer.array(dtype, size), "pad", whole, zero, more=f", padding=0_{rest}")
    return whole, size


def _apart(lines: Lines, bucket: Sequence[_Sum], summed: str, size: int) -> None:
    """Every sum of the bucket under its name."""
    begin = 0
    for one in bucket:
        end, part = begin + one.array.size, summed
        if (begin, end) != (0, size):
            flat = lines.writer.array(one.array.dtype, one.array.size)
            part = lines.add("part", flat, "slice", summed, more=f", slice={{[{begin}:{end}]}}")
        lines.end(one.op, "reshape", part)
        begin = end


@dataclass(frozen=True)
class _Reduction:
    """Writes the phases of a sum."""

    lines: Lines
    first: _Sum  # of the bucket
    on_gpu: bool
    wire: Wire | None

    def run(self, steps: Sequence[_Step], value: str, size: int) -> str:
        """The whole sum of a flat array."""
        gathered: list[_Step] = []
        for step in steps:
            if step.phase.scatters:
                value, size = self._scatter(step, value, size // step.size), size // step.size
                gathered.append(step)
            elif self.wire is not None and step is steps[-1]:
                value = self.wire.sum(self.lines, step.groups, value, size, self._adds, tuples=not self.on_gpu)
            else:
                value = self.lines.collective("sum", REDUCE, self._array(size), step.groups, value, more=self._adds)
        for step in reversed(gathered):
            size *= step.size
            value = self.lines.collective(
                "gather", "all-gather", self._array(size), step.groups, value, more=", dimensions={0}"
            )
        return value

    def _scatter(self, step: _Step, value: str, size: int) -> str:
        """Each device's part of the sum, of so many elements."""
        if self.on_gpu:
            more = f", dimensions={{0}}{self._adds}"
            return self.lines.collective("scatter", "reduce-scatter", self._array(size), step.groups, value, more=more)
        # gloo's reduce-scatter gives wrong sums: every device gets all parts of its own, and adds them
        cuts = [f", slice={{[{part * size}:{(part + 1) * size}]}}" for part in range(step.size)]
        parts = [self.lines.add("cut", self._array(size), "slice", value, more=cut) for cut in cuts]
        return self.lines.exchanged_sum(self._array(size), step.groups, parts)

    def _array(self, size: int) -> Array:
        return self.lines.writer.array(self.first.array.dtype, size)

    @property
    def _adds(self) -> str:
        return adds_by(self.first.op)
