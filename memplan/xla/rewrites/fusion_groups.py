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
    prevents_vectorization,
    result_buffers,
)
from memplan.xla.shapes import Array, shape_text

MOST_ARRAYS = 96  # operands and results of a fusion (`MaxOperandsAndOutputsPerFusion`)
SHARED_NBYTES = 48 << 10  # of a block, on every GPU: XLA accepts more, but its assembler then refuses the kernel

Touched = tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]


@dataclass(frozen=True)
class Constraints:
    """Constraints of every kernel, by name, that merging must keep."""

    before: Mapping[str, Sequence[str]]  # kernels that must run before it
    shared: Mapping[str, Touched]  # the parts of shared buffers that it reads and writes: place and buffer


def constraints_of(problem: Problem) -> Constraints:
    name = [kernel.name for kernel in problem.kernels]
    place = [buffer.alias_set for buffer in problem.buffers]
    several = [len(problem.alias_sets[one]) > 1 for one in place]

    def among_several(buffers: Sequence[int]) -> frozenset[tuple[int, int]]:
        return frozenset((place[buffer], buffer) for buffer in buffers if several[buffer])

    return Constraints(
        {name[number]: [name[one] for one in before] for number, before in precedence(problem).items()},
        {one.name: (among_several(one.reads), among_several(one.writes)) for one in problem.kernels},
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
        """`originals`: clone -> the fusion that it recomputes; only clones are merged, see `merge`."""
        self._body, self._constraints, self._most_nbytes, self._originals = body, constraints, most_nbytes, originals
        fusions = (mergeable(module, body, op) for op in body.ops.values())
        self._fusions = {one.op.name: one for one in fusions if one is not None}
        self._groups = {name: [one] for name, one in self._fusions.items()}
        self._in = {name: name for name in body.ops}  # the current group of an instruction
        self._before = {
            op.name: {*op.operands, *(one for one in constraints.before.get(op.name, ()) if one in body.ops)}
            for op in body.ops.values()
        }
        self._order = list(body.ops)
        self._at = {name: at for at, name in enumerate(self._order)}

    def merge(self) -> tuple[list[list[Mergeable]], list[str]]:
        """The groups, and names in order; a group is at the position of its last fusion."""
        for *_, first, second in sorted(self._pairs()):
            one, other = sorted((self._in[first], self._in[second]), key=self._at.__getitem__)
            if one != other and self._may_merge(one, other):
                self._merge(one, other)
        return [group for group in self._groups.values() if len(group) > 1], [name for name in self._order if name]

    def _pairs(self) -> Iterator[tuple[int, int, str, str]]:
        """A sort key: negative savings, distance, and the two fusions."""
        readers = defaultdict[str, list[str]](list)
        for name, one in self._fusions.items():
            for read in one.reads:
                readers[read].append(name)
        saved: dict[tuple[str, str], int] = defaultdict(int)
        for read, names in readers.items():
            maker = instruction_of(read)
            nbytes = self._fusions[names[0]].reads[read]
            for number, name in enumerate(names):
                if maker in self._fusions:
                    saved[maker, name] += nbytes
                for later in names[number + 1 :]:
                    saved[name, later] += nbytes
        for (first, second), nbytes in saved.items():
            apart = self._at[second] - self._at[first]
            if self._fusions[first].space == self._fusions[second].space and self._may_pair(first, second, apart):
                yield -nbytes, apart, first, second

    def _may_pair(self, first: str, second: str, apart: int) -> bool:
        """Is one of them a clone, and the other closer to it than its original?"""
        if self._originals is None:
            return True
        clones = [name for name in (first, second) if name in self._originals]
        return bool(clones) and all(apart < self._at[name] - self._at[self._originals[name]] for name in clones)

    def _may_merge(self, one: str, other: str) -> bool:
        return self._stays_apart(one, other) and self._compatible(self._groups[one], self._groups[other])

    def _stays_apart(self, one: str, other: str) -> bool:
        """Is no clone merged with its original through another fusion?"""
        if self._originals is None:
            return True
        at = {fusion.op.name: self._at[group] for group in (one, other) for fusion in self._groups[group]}
        return all(
            abs(at[name] - there) < at[name] - self._at[self._in[self._originals[name]]]
            for name in at
            if name in self._originals
            for there in at.values()
        )

    def _compatible(self, ones: Sequence[Mergeable], others: Sequence[Mergeable]) -> bool:
        """Do they iterate over the same elements, does neither wait for the other's sums, and do all bits stay?"""
        both = [*ones, *others]
        sums = [one for fusion in both for one in fusion.sums]
        if len({fusion.space for fusion in both}) > 1 or len(set(sums)) > 1:
            return False
        if sum(fusion.arrays for fusion in both) > MOST_ARRAYS or self._nbytes(both) > self._most_nbytes:
            return False
        if (sums and not (self._sums_in_order(both) and self._tiles_fit(both))) or self._overwritten(ones, others):
            return False
        made = {name: (fusion.fused, leaf) for fusion in both for leaf, name in enumerate(fusion.makes)}
        given = {buffer_of(self._body, operand) for fusion in both for operand in fusion.op.operands}
        for fused, leaf in (made[name] for name in given & made.keys()):
            result = fused.results[leaf]
            if fused.behind_bitcasts(result).opcode == "reduce" or not keeps_bits(fused, result):
                return False
        return True

    def _overwritten(self, ones: Sequence[Mergeable], others: Sequence[Mergeable]) -> bool:
        """Does one overwrite an operand of the other? Merged, they would do so at the same time."""
        shared = self._constraints.shared
        for one in ones:
            for other in others:
                (read, written), (late_read, late_written) = shared[one.op.name], shared[other.op.name]
                pairs = (*itertools.product(read, late_written), *itertools.product(written, late_read | late_written))
                if any(place == same and buffer != version for (place, buffer), (same, version) in pairs):
                    return True
        return False

    def _sums_in_order(self, group: Sequence[Mergeable]) -> bool:
        """Do sums add in the same order as alone?"""
        one_by_one = any(prevents_vectorization(fusion.fused) for fusion in group)
        return len(set(map(self._narrowest_bits, group))) == 1 and not one_by_one

    def _tiles_fit(self, group: Sequence[Mergeable]) -> bool:
        """Do the tiles of all sums fit in a block's shared memory? Sums along rows have none.

        A tile is 32 x 32 vectors, of two elements or four, and one more column.
        """
        vector = 2 if min(self._narrowest_bits(fusion)[0] for fusion in group) >= 32 else 4
        made = (fusion.fused.behind_bitcasts(one) for fusion in group if fusion.columns for one in fusion.fused.results)
        nbytes = sum(array.bits // 8 for op in made if op.opcode == "reduce" for array in op.result)
        return 32 * (32 * vector + 1) * nbytes <= SHARED_NBYTES

    def _nbytes(self, group: Sequence[Mergeable]) -> int:
        """Bytes that are live while they run as one."""
        made = {name for fusion in group for name in fusion.makes}
        reads = {name: nbytes for fusion in group for name, nbytes in fusion.reads.items() if name not in made}
        return sum(reads.values()) + sum(fusion.op.nbytes for fusion in group)

    def _narrowest_bits(self, fusion: Mergeable) -> tuple[int, int]:
        return narrowest_bits(fusion.op, (self._body.ops[name] for name in fusion.op.operands))

    def _merge(self, one: str, other: str) -> None:
        """Merge two groups under the later one's name, unless a dependency of one depends on the other."""
        begin, end = self._at[one], self._at[other]
        ahead = self._needed_by(one, other)
        if ahead is None:
            return
        between = [name for name in self._order[begin + 1 : end] if name]
        behind = self._waiting_for(one, between) if self._made_nbytes(ahead) >= LEAST_BYTES else None
        if behind is not None and self._made_nbytes(behind) <= self._made_nbytes(ahead):
            order = [*_without(between, behind), other, *behind]
        else:
            order = [*ahead, other, *_without(between, ahead)]
        order = [""] * (end + 1 - begin - len(order)) + order  # so that those after it keep their positions
        self._order[begin : end + 1] = order
        self._at.update((name, at) for at, name in enumerate(order, begin))
        self._groups[other] = self._groups.pop(one) + self._groups[other]
        before = {name for name in self._before[other] if not self._belongs_to(name, one)}
        self._before[other] = self._before[one] | before
        for fusion in self._groups[other]:
            self._in[fusion.op.name] = other

    def _needed_by(self, one: str, other: str) -> list[str] | None:
        """The later one's dependencies after the earlier one; None if one of them depends on the earlier one."""
        begin, found, todo = self._at[one], set[str](), [other]
        while todo:
            name = todo.pop()
            for before in {self._in[before] for before in self._before[name]}:
                if self._at[before] < begin or before in found:
                    continue
                if not self._belongs_to(before, one):
                    found.add(before)
                    todo.append(before)
                elif name != other:
                    return None
        return sorted(found, key=self._at.__getitem__)

    def _waiting_for(self, one: str, between: Sequence[str]) -> list[str]:
        """Kernels that depend on the earlier one."""
        waiting, found = {one}, list[str]()
        for name in between:
            if not waiting.isdisjoint({self._in[before] for before in self._before[name]}):
                waiting.add(name)
                found.append(name)
        return found

    def _belongs_to(self, name: str, group: str) -> bool:
        """Is it the group, or a name of one of its results?"""
        while self._in[name] != group:
            op = self._body.ops[name]
            if op.opcode not in NAMING:
                return False
            name = op.operands[0]
        return True

    def _made_nbytes(self, names: Sequence[str]) -> int:
        """Bytes that kernels write."""
        return sum(self._body.ops[name].nbytes for name in names if self._body.ops[name].opcode not in NAMING)


def _without(names: Sequence[str], others: Collection[str]) -> list[str]:
    left_out = set(others)
    return [name for name in names if name not in left_out]


_INSIDE = CHEAP | {"reduce", "tuple"}
Space = tuple[tuple[int, ...], str]  # dimensions and layout


@dataclass(frozen=True)
class Mergeable:
    """A fusion that may be merged."""

    op: Instruction
    fused: Computation
    space: Space  # the array over whose elements it iterates
    sums: tuple[tuple[str, str, str], ...]  # for its reductions: operand shape, dimensions, result
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
    if len(fused.results) != len(op.result) or any(one.opcode not in _INSIDE for one in fused.ops.values()):
        return None
    spaces, sums, columns = set[Space](), list[tuple[str, str, str]](), False
    for result in fused.results:
        maker = fused.behind_bitcasts(result)
        if maker.opcode == "reduce":
            operand = fused.ops[maker.operands[0]]
            along = maker.attributes.partition("dimensions={")[2].partition("}")[0]
            sums.append((str(operand.shape), along, shape_text(maker.shape)))
            columns |= operand.result[0].minor not in map(int, along.split(","))
            maker = fused.behind_bitcasts(operand)
        elif maker.opcode == "parameter":
            return None
        if not isinstance(maker.shape, Array):
            return None
        spaces.add((maker.shape.dims, maker.shape.layout))
    reductions = sum(one.opcode == "reduce" for one in fused.ops.values())
    if len(spaces) != 1 or reductions != len(sums) or bool(sums) != (op.attribute("kind") == "kInput"):
        return None
    reads = {buffer_of(body, name): body.behind_bitcasts(body.ops[name]).nbytes for name in op.operands}
    large = {name: nbytes for name, nbytes in reads.items() if nbytes >= LEAST_BYTES}
    return Mergeable(op, fused, spaces.pop(), tuple(sums), columns, large, result_buffers(op))
