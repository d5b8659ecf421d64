"""All-reduces over hosts, in phases and in buckets, on request with a narrower type between hosts.

The devices of a host first add their arrays there, in parts; only the sums of these parts go to
other hosts (Cho et al., PowerAI DDL, arXiv:1708.02188).

Sums of NCCL go in phases only with a narrower type. In their own, its trees send as few bytes
between hosts (`memplan.hardware.collectives`): steps of `experiments.bench meshes` took 2 to 7 %
less in phases. Those of gloo, a ring, took 38 % less time (`experiments/distributed/slow_link`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memplan.hardware.backend import Backend
from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.cost import EXCHANGE, GATHER, REDUCE, SCATTER, over_groups
from memplan.xla.collectives.wire import Wire
from memplan.xla.collectives.writing import Builder, CollectiveEdit, adds_up, ordered, waits_for
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

# Buckets end at 32 MiB. An MLP with 128 MiB of gradients on 2 x 4 A100 took 5.74 ms with 16 MiB,
# 5.70 with 25, 5.52 with 32, 5.91 with 64.
_BUCKET_NBYTES = 32 << 20
# What waits for these instructions waits long.
_HEAVY = frozenset(
    {
        "call",
        "cholesky",
        "conditional",
        "custom-call",
        "fft",
        "sort",
        "triangular-solve",
        "while",
    }
)


@dataclass(frozen=True)
class _Sum:
    """An array that is summed over groups of partitions."""

    op: Instruction  # gives the sum: the collective, or an element of its result
    collective: Instruction  # the all-reduce
    operand: Instruction
    groups: Groups
    ready: float  # FLOPs of the longest path to the operand
    depth: int  # sums on the longest path to it; -1 if no other sum needs it, and it may wait

    @property
    def array(self) -> Array:
        return self.op.result[0]


def sums_in_phases(module: Module, machine: Machine, backend: Backend, wire: Wire | None) -> Module:
    """The module with all-reduces over hosts in phases, where that is faster.

    Args:
      wire: the type in which sums of float32 are sent between hosts, which are then the only ones
        that change.
    """
    edit = CollectiveEdit(module)
    for body in module.values():
        replacements: dict[str, Sequence[Instruction]] = {}
        split: set[str] = set()  # all-reduces of several arrays that are taken apart
        for bucket in _buckets(module, body, machine, wire):
            phases = _phases(edit, machine, bucket, backend, wire)
            if phases:
                replacements |= {member.op.name: () for member in bucket}
                replacements[bucket[0].op.name] = phases
                elements = (member for member in bucket if member.op is not member.collective)
                split |= {member.collective.name for member in elements}
        if replacements:
            separate = _separate(edit, body, split, replacements)
            edit.splice(body, replacements | separate, split)
    return edit.module


def _separate(
    edit: CollectiveEdit,
    body: Computation,
    split: Collection[str],
    replaced: Collection[str],
) -> dict[str, Sequence[Instruction]]:
    """The sums that stay as they are, of all-reduces that are taken apart: each by itself."""
    sums: dict[str, Sequence[Instruction]] = {}
    for op in body.ops.values():  # in order, so that every host draws the same channels
        if op.name not in split:
            continue
        for user, _ in body.uses[op.name]:
            if user.name not in replaced:
                builder = Builder(edit, op, op)
                builder.end_by_sum(user, op, body.ops[op.operands[user.index]])
                sums[user.name] = builder.ops
    return sums


def _buckets(
    module: Module, body: Computation, machine: Machine, wire: Wire | None
) -> Iterator[list[_Sum]]:
    """Sums that are sent together: none of them needs another.

    Sums that nothing heavy waits for go with those that are ready about then. Sums that are waited
    for, such as batch statistics, go with those that are ready at the same time.
    """
    alike: dict[object, list[_Sum]] = defaultdict(list)
    for member in _sums(module, body, machine):
        if wire is not None and member.array.dtype != "f32":
            continue
        ready = member.ready if member.depth >= 0 else None
        alike[member.array.dtype, member.groups, member.depth, ready].append(member)
    for members in alike.values():
        bucket: list[_Sum] = []
        nbytes = 0
        for member in sorted(members, key=lambda member: member.ready):
            if bucket and nbytes + member.array.nbytes > _BUCKET_NBYTES:
                yield bucket
                bucket = []
                nbytes = 0
            bucket.append(member)
            nbytes += member.array.nbytes
        yield bucket


def _sums(module: Module, body: Computation, machine: Machine) -> Iterator[_Sum]:
    """Arrays that are added over several hosts, and of which no device needs just a part."""
    all_reduces = list(_all_reduces(module, body))
    if not all_reduces:
        return
    reduces = {name for op, collective, _ in all_reduces for name in (op.name, collective.name)}
    flops = {op.name: matrix_flops(module, body, op) for op in body.ops.values()}
    ready: dict[str, float] = {}
    depth: dict[str, int] = {}
    for op in body.ops.values():
        before = waits_for(op)
        ready[op.name] = max((ready[name] for name in before), default=0.0) + flops[op.name]
        depth[op.name] = max((depth[name] for name in before), default=0) + (op.opcode == REDUCE)
    needed: set[str] = set()  # by something heavy, or another sum
    for op in reversed(list(body.ops.values())):
        if op.name in needed or op.name in reduces or op.opcode in _HEAVY or flops[op.name]:
            needed.update(waits_for(op))
    hosts = machine.hosts()
    for op, collective, operand in all_reduces:
        groups = collective.groups(len(machine.devices))
        over_hosts = any(len({hosts[member] for member in group}) > 1 for group in groups)
        if over_hosts and not _is_scattered(body, op) and _is_plain(op.result[0]):
            may_wait = op.name not in needed and not op.root
            at_depth = -1 if may_wait else depth[operand.name]
            yield _Sum(op, collective, operand, groups, ready[operand.name], at_depth)


def _all_reduces(
    module: Module,
    body: Computation,
) -> Iterator[tuple[Instruction, Instruction, Instruction]]:
    """(sum, all-reduce, operand) of all-reduces that add.

    The sums of an all-reduce of several arrays are the elements of its result.
    """
    in_order = ordered(body)
    for op in body.ops.values():
        if op.opcode != REDUCE or op.name in in_order or not adds_up(module, op):
            continue
        operands = [body.ops[name] for name in op.operands]
        if isinstance(op.shape, Array):
            yield op, op, operands[0]
            continue
        users = [user for user, _ in body.uses[op.name]]
        indices = {user.index for user in users if user.opcode == "get-tuple-element"}
        if op.root or len(indices) != len(users):
            continue
        if in_order.isdisjoint(user.name for user in users):
            for user in users:
                yield user, op, operands[user.index]


def _is_plain(array: Array) -> bool:
    """Can a bucket hold it, as a flat array with others before it and zeros behind it?"""
    is_number = array.bits >= 8 and array.dtype[0] in "bfsu"
    return is_number and array.size > 0 and array.is_row_major


def _is_scattered(body: Computation, op: Instruction) -> bool:
    """Does XLA make a reduce-scatter of it, since every reader takes its own part?"""
    users = [user for user, _ in body.uses[op.name]]
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _phases(
    edit: CollectiveEdit,
    machine: Machine,
    bucket: Sequence[_Sum],
    backend: Backend,
    wire: Wire | None,
) -> Sequence[Instruction]:
    """The phases of a bucket; none where it stays as XLA has it."""
    first = bucket[0]
    grid = machine.grid(first.groups)
    if grid is None:
        return ()
    outermost, *inner = [level for level, size in enumerate(grid.sizes) if size > 1]
    inside = [grid.along({level}) for level in reversed(inner)]
    across = grid.along({outermost})
    size = sum(member.array.size for member in bucket)
    whole_s = _whole_s(machine, first.groups, size * first.array.bits // 8, backend)
    size += -size % len(first.groups[0])
    nbytes = size * first.array.bits // 8
    if _in_phases_s(machine, inside, across, nbytes, backend, wire) >= whole_s:
        return ()
    builder = Builder(edit, first.op, first.op if first.op.has_metadata else first.collective)
    whole = _concatenated(builder, bucket, size)
    reduction = _Reduction(builder, first.collective.to_apply, backend, wire)
    _split(builder, bucket, reduction.run(inside, across, whole))
    return builder.ops


def _whole_s(machine: Machine, groups: Groups, nbytes: int, backend: Backend) -> float:
    """Seconds of an all-reduce as XLA has it."""
    if backend.sums_along_trees:
        return over_groups(machine, REDUCE, groups, nbytes).seconds
    return 2 * over_groups(machine, SCATTER, groups, nbytes).seconds  # a ring


def _in_phases_s(
    machine: Machine,
    inside: Sequence[Groups],
    across: Groups,
    nbytes: int,
    backend: Backend,
    wire: Wire | None,
) -> float:
    """Seconds of an all-reduce in phases."""
    seconds = 0.0
    for groups in inside:
        seconds += 2 * over_groups(machine, SCATTER, groups, nbytes).seconds
        nbytes //= len(groups[0])
    if wire is None:
        return seconds + _whole_s(machine, across, nbytes, backend)
    narrow_nbytes = nbytes * wire.nbytes // 4
    exchange_s = over_groups(machine, EXCHANGE, across, narrow_nbytes).seconds
    return seconds + exchange_s + over_groups(machine, GATHER, across, narrow_nbytes).seconds


def _concatenated(builder: Builder, bucket: Sequence[_Sum], size: int) -> Instruction:
    """The arrays of a bucket as one flat array, with zeros up to so many elements."""
    dtype = bucket[0].array.dtype
    flat = [builder.reshape("flat", member.operand, member.array.size) for member in bucket]
    whole = flat[0]
    if len(flat) > 1:
        shape = builder.edit.array(dtype, sum(member.array.size for member in bucket))
        whole = builder.add("bucket", "concatenate", shape, *flat, dimensions=[0])
    if missing := size - whole.result[0].size:
        zero = builder.scalar(dtype, 0)
        shape = builder.edit.array(dtype, size)
        whole = builder.add("padded", "pad", shape, whole, zero, padding=[(0, missing, 0)])
    return whole


def _split(builder: Builder, bucket: Sequence[_Sum], total: Instruction) -> None:
    """Every sum of the bucket under its name."""
    begin = 0
    for member in bucket:
        end = begin + member.array.size
        part = total
        if (begin, end) != (0, total.result[0].size):
            shape = builder.edit.array(member.array.dtype, member.array.size)
            part = builder.add("part", "slice", shape, total, slices=[(begin, end, 1)])
        builder.end(member.op, "reshape", part)
        begin = end


@dataclass(frozen=True)
class _Reduction:
    """Writes the phases of a sum."""

    builder: Builder
    to_apply: str  # adds two elements
    backend: Backend
    wire: Wire | None

    def run(self, inside: Sequence[Groups], across: Groups, value: Instruction) -> Instruction:
        """The whole sum of a flat array."""
        for groups in inside:
            value = self._scatter(groups, value)
        if self.wire is not None:
            value = self.wire.sum(self.builder, across, value, self.to_apply, self.backend)
        else:
            value = self.builder.collective(
                "sum",
                REDUCE,
                value.result[0],
                value,
                groups=across,
                to_apply=self.to_apply,
            )
        for groups in reversed(inside):
            array = value.result[0]
            shape = self.builder.edit.array(array.dtype, array.size * len(groups[0]))
            value = self.builder.collective(
                "gather", GATHER, shape, value, groups=groups, dimensions=[0]
            )
        return value

    def _scatter(self, groups: Groups, value: Instruction) -> Instruction:
        """Each device's part of the sum."""
        parts = len(groups[0])
        size = value.result[0].size // parts
        shape = self.builder.edit.array(value.result[0].dtype, size)
        if self.backend.scatters_sums:
            return self.builder.collective(
                "scatter",
                SCATTER,
                shape,
                value,
                groups=groups,
                dimensions=[0],
                to_apply=self.to_apply,
            )
        # gloo's reduce-scatter gives wrong sums. Every device gets all parts of its own, and adds
        # them.
        bounds = [(part * size, (part + 1) * size, 1) for part in range(parts)]
        cuts = [self.builder.add("cut", "slice", shape, value, slices=[bound]) for bound in bounds]
        return self.builder.exchanged_sum(groups, cuts)
