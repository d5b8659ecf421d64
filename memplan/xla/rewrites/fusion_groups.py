"""Which fusions of a computation are merged, and the order of its instructions afterwards."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.precedence import precedence
from memplan.planning.problem import Problem
from memplan.xla.buffers import instruction_of
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.rewrites.fusion import (
    CHEAP,
    LEAST_BYTES,
    NAMING,
    buffer_of,
    has_tuple_readers,
    is_open,
    keeps_bits,
    narrowest_bits,
    operand_nbytes,
    prevents_vectorization,
    result_buffers,
)
from memplan.xla.shapes import Array, Layout, Shape

MOST_ARRAYS = 96  # most operands and results of a fusion (`MaxOperandsAndOutputsPerFusion`)
# Most bytes of shared memory in a block: every GPU has them; XLA accepts more, but its assembler
# then refuses the kernel.
SHARED_NBYTES = 48 << 10

# The parts of shared buffers that a kernel reads, and those that it writes: place and buffer.
Accesses = tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]


@dataclass(frozen=True)
class Constraints:
    """Constraints of every kernel, by name, that merging must keep."""

    before: Mapping[str, Sequence[str]]  # kernels that must run before it
    shared: Mapping[str, Accesses]


def constraints_of(problem: Problem) -> Constraints:
    names = [kernel.name for kernel in problem.kernels]
    places = [buffer.alias_set for buffer in problem.buffers]
    is_shared = [len(problem.alias_sets[place]) > 1 for place in places]

    def shared(buffers: Sequence[int]) -> frozenset[tuple[int, int]]:
        return frozenset((places[buffer], buffer) for buffer in buffers if is_shared[buffer])

    before = {
        names[number]: [names[predecessor] for predecessor in predecessors]
        for number, predecessors in precedence(problem).items()
    }
    return Constraints(
        before,
        {kernel.name: (shared(kernel.reads), shared(kernel.writes)) for kernel in problem.kernels},
    )


class FusionGroups:
    """The groups while they grow; each has the name and the position of its last fusion."""

    def __init__(
        self,
        module: Module,
        body: Computation,
        constraints: Constraints,
        most_nbytes: int,
        originals: Mapping[str, str] | None,
    ) -> None:
        """Every fusion alone.

        Args:
          most_nbytes: what operands and results of a group may take.
          originals: clone -> the fusion that it recomputes; only clones are merged, see `merge`.
        """
        self._body = body
        self._constraints = constraints
        self._most_nbytes = most_nbytes
        self._originals = originals
        fusions = (mergeable(module, body, op) for op in body.ops.values())
        self._fusions = {fusion.op.name: fusion for fusion in fusions if fusion is not None}
        self._groups = {name: [fusion] for name, fusion in self._fusions.items()}
        self._group_of = {name: name for name in body.ops}  # of an instruction
        # instruction or group -> instructions that must run before it
        self._dependencies = {
            op.name: {
                *op.operands,
                *(name for name in constraints.before.get(op.name, ()) if name in body.ops),
            }
            for op in body.ops.values()
        }
        self._order = list(body.ops)
        self._position = {name: position for position, name in enumerate(self._order)}

    def merge(self) -> tuple[list[list[Mergeable]], list[str]]:
        """The groups, and names in order; a group is at the position of its last fusion."""
        for *_, first, second in sorted(self._pairs()):
            names = (self._group_of[first], self._group_of[second])
            earlier, later = sorted(names, key=self._position.__getitem__)
            if earlier != later and self._may_merge(earlier, later):
                self._merge(earlier, later)
        groups = [group for group in self._groups.values() if len(group) > 1]
        return groups, [name for name in self._order if name]

    def _pairs(self) -> Iterator[tuple[int, int, str, str]]:
        """A sort key: negative savings, distance, and the two fusions."""
        readers = defaultdict[str, list[str]](list)
        for name, fusion in self._fusions.items():
            for buffer in fusion.reads:
                readers[buffer].append(name)
        saved_nbytes: dict[tuple[str, str], int] = defaultdict(int)
        for buffer, names in readers.items():
            producer = instruction_of(buffer)
            nbytes = self._fusions[names[0]].reads[buffer]
            for number, name in enumerate(names):
                if producer in self._fusions:
                    saved_nbytes[producer, name] += nbytes
                for later in names[number + 1 :]:
                    saved_nbytes[name, later] += nbytes
        for (first, second), nbytes in saved_nbytes.items():
            distance = self._position[second] - self._position[first]
            same_space = self._fusions[first].space == self._fusions[second].space
            if same_space and self._may_pair(first, second, distance):
                yield -nbytes, distance, first, second

    def _may_pair(self, first: str, second: str, distance: int) -> bool:
        """Is one of them a clone, and the other closer to it than its original?"""
        if self._originals is None:
            return True
        clones = [name for name in (first, second) if name in self._originals]
        return bool(clones) and all(distance < self._original_distance(clone) for clone in clones)

    def _original_distance(self, clone: str) -> int:
        assert self._originals is not None
        return self._position[clone] - self._position[self._originals[clone]]

    def _may_merge(self, earlier: str, later: str) -> bool:
        if not self._keeps_originals_apart(earlier, later):
            return False
        return self._are_compatible(self._groups[earlier], self._groups[later])

    def _keeps_originals_apart(self, earlier: str, later: str) -> bool:
        """Is no clone merged with its original through another fusion?"""
        if self._originals is None:
            return True
        positions: dict[str, int] = {}
        for group in (earlier, later):
            members = self._groups[group]
            positions.update((fusion.op.name, self._position[group]) for fusion in members)
        for name, position in positions.items():
            if name not in self._originals:
                continue
            original = self._position[self._group_of[self._originals[name]]]
            if any(abs(position - member) >= position - original for member in positions.values()):
                return False
        return True

    def _are_compatible(self, first: Sequence[Mergeable], second: Sequence[Mergeable]) -> bool:
        """May they be one kernel?

        They iterate over the same elements, neither waits for the other's sums, and all bits stay.
        """
        fusions = [*first, *second]
        sums = [fused_sum for fusion in fusions for fused_sum in fusion.sums]
        if len({fusion.space for fusion in fusions}) > 1 or len(set(sums)) > 1:
            return False
        if sum(fusion.arrays for fusion in fusions) > MOST_ARRAYS:
            return False
        if self._nbytes(fusions) > self._most_nbytes:
            return False
        if sums and not (self._sums_in_order(fusions) and self._tiles_fit(fusions)):
            return False
        return not self._is_overwritten(first, second) and self._keeps_bits(fusions)

    def _keeps_bits(self, fusions: Sequence[Mergeable]) -> bool:
        """Do values that one reads from another have the same bits inside of one fusion?"""
        operands = {operand for fusion in fusions for operand in fusion.op.operands}
        reads = {buffer_of(self._body, operand) for operand in operands}
        results = [
            (fusion.fused, result)
            for fusion in fusions
            for buffer, result in zip(fusion.makes, fusion.fused.results, strict=True)
            if buffer in reads
        ]
        for fused, result in results:
            if fused.behind_bitcasts(result).opcode == "reduce" or not keeps_bits(fused, result):
                return False
        return True

    def _is_overwritten(self, first: Sequence[Mergeable], second: Sequence[Mergeable]) -> bool:
        """Does one overwrite an operand of the other? Merged, they would do so at the same time."""
        shared = self._constraints.shared
        for fusion, later_fusion in itertools.product(first, second):
            read, written = shared[fusion.op.name]
            later_read, later_written = shared[later_fusion.op.name]
            pairs = itertools.chain(
                itertools.product(read, later_written),
                itertools.product(written, later_read | later_written),
            )
            if any(
                place == later_place and buffer != later_buffer
                for (place, buffer), (later_place, later_buffer) in pairs
            ):
                return True
        return False

    def _sums_in_order(self, group: Sequence[Mergeable]) -> bool:
        """Do sums add in the same order as alone?"""
        if any(prevents_vectorization(fusion.fused) for fusion in group):
            return False
        return len(set(map(self._narrowest_bits, group))) == 1

    def _tiles_fit(self, group: Sequence[Mergeable]) -> bool:
        """Do the tiles of all sums fit in a block's shared memory? Sums along rows have none.

        A tile is 32 x 32 vectors, of two elements or four, and one more column.
        """
        vector = 2 if min(self._narrowest_bits(fusion)[0] for fusion in group) >= 32 else 4
        results = (
            fusion.fused.behind_bitcasts(result)
            for fusion in group
            if fusion.columns
            for result in fusion.fused.results
        )
        reductions = (op for op in results if op.opcode == "reduce")
        nbytes = sum(array.bits // 8 for op in reductions for array in op.result)
        return 32 * (32 * vector + 1) * nbytes <= SHARED_NBYTES

    def _nbytes(self, group: Sequence[Mergeable]) -> int:
        """Bytes that are live while they run as one."""
        reads = {buffer: nbytes for fusion in group for buffer, nbytes in fusion.reads.items()}
        for fusion in group:
            for buffer in fusion.makes:
                reads.pop(buffer, None)
        return sum(reads.values()) + sum(fusion.op.nbytes for fusion in group)

    def _narrowest_bits(self, fusion: Mergeable) -> tuple[int, int]:
        return narrowest_bits(fusion.op, (self._body.ops[name] for name in fusion.op.operands))

    def _merge(self, earlier: str, later: str) -> None:
        """Merge two groups under the later's name.

        They stay apart if a dependency of the later depends on the earlier.
        """
        begin = self._position[earlier]
        end = self._position[later]
        ahead = self._needed_by(earlier, later)
        if ahead is None:
            return
        between = [name for name in self._order[begin + 1 : end] if name]
        order = [*ahead, later, *_without(between, ahead)]
        if self._written_nbytes(ahead) >= LEAST_BYTES:
            behind = self._waiting_for(earlier, between)
            if self._written_nbytes(behind) <= self._written_nbytes(ahead):
                order = [*_without(between, behind), later, *behind]
        # blanks before them, so that those after it keep their positions
        order = [""] * (end + 1 - begin - len(order)) + order
        self._order[begin : end + 1] = order
        self._position.update((name, position) for position, name in enumerate(order, begin))
        self._groups[later] = self._groups.pop(earlier) + self._groups[later]
        outer = (name for name in self._dependencies[later] if not self._belongs_to(name, earlier))
        self._dependencies[later] = self._dependencies[earlier].union(outer)
        for fusion in self._groups[later]:
            self._group_of[fusion.op.name] = later

    def _needed_by(self, earlier: str, later: str) -> list[str] | None:
        """Dependencies of the later that run after the earlier; None if one needs the earlier."""
        begin = self._position[earlier]
        needed = set[str]()
        stack = [later]
        while stack:
            name = stack.pop()
            groups = {self._group_of[dependency] for dependency in self._dependencies[name]}
            for group in groups:
                if self._position[group] < begin or group in needed:
                    continue
                if not self._belongs_to(group, earlier):
                    needed.add(group)
                    stack.append(group)
                elif name != later:
                    return None
        return sorted(needed, key=self._position.__getitem__)

    def _waiting_for(self, earlier: str, between: Sequence[str]) -> list[str]:
        """Kernels that depend on the earlier one."""
        waiting = {earlier: None}
        for name in between:
            groups = {self._group_of[dependency] for dependency in self._dependencies[name]}
            if not groups.isdisjoint(waiting):
                waiting[name] = None
        return list(waiting)[1:]

    def _belongs_to(self, name: str, group: str) -> bool:
        """Is it the group, or a name of one of its results?"""
        while self._group_of[name] != group:
            op = self._body.ops[name]
            if op.opcode not in NAMING:
                return False
            name = op.operands[0]
        return True

    def _written_nbytes(self, names: Sequence[str]) -> int:
        """Bytes that kernels write."""
        ops = (self._body.ops[name] for name in names)
        return sum(op.nbytes for op in ops if op.opcode not in NAMING)


def _without(names: Sequence[str], removed: Collection[str]) -> list[str]:
    removed = set(removed)
    return [name for name in names if name not in removed]


# A fusion of these opcodes may be merged.
_INSIDE = CHEAP | {"reduce", "tuple"}
Space = tuple[tuple[int, ...], Layout]  # dimensions and layout
Sum = tuple[Shape, tuple[int, ...], Shape]  # a reduction's operand, dimensions and result


@dataclass(frozen=True)
class Mergeable:
    """A fusion that may be merged."""

    op: Instruction
    fused: Computation
    space: Space  # the array over whose elements it iterates
    sums: tuple[Sum, ...]  # for its reductions
    columns: bool  # it reduces columns: neighbours in memory are in different sums
    reads: Mapping[str, int]  # its large operands, and their bytes
    makes: tuple[str, ...]  # its results as buffers

    @property
    def arrays(self) -> int:
        return len(self.op.operands) + len(self.makes)


def mergeable(module: Module, body: Computation, op: Instruction) -> Mergeable | None:
    """The instruction as such a fusion, if it is one."""
    if not is_open(op) or op.root or has_tuple_readers(body, op):
        return None
    fused = module[op.called[0]]
    opcodes = [inner_op.opcode for inner_op in fused.ops.values()]
    if len(fused.results) != len(op.result) or not _INSIDE.issuperset(opcodes):
        return None
    spaces = set[Space]()
    sums: list[Sum] = []
    columns = False
    for result in fused.results:
        producer = fused.behind_bitcasts(result)
        if producer.opcode == "parameter":
            return None
        if producer.opcode == "reduce":
            operand = fused.ops[producer.operands[0]]
            sums.append((operand.shape, producer.dimensions, producer.shape))
            columns |= operand.result[0].minor not in producer.dimensions
            producer = fused.behind_bitcasts(operand)
        if not isinstance(producer.shape, Array):
            return None
        spaces.add((producer.shape.dims, producer.shape.layout))
    if len(spaces) != 1 or opcodes.count("reduce") != len(sums):
        return None
    if bool(sums) != (op.kind == "kInput"):
        return None
    reads = operand_nbytes(body, op)
    large_reads = {buffer: nbytes for buffer, nbytes in reads.items() if nbytes >= LEAST_BYTES}
    return Mergeable(op, fused, spaces.pop(), tuple(sums), columns, large_reads, result_buffers(op))
