"""A scheduled module -> one in which fusions that read the same, or one the other's result, are one fusion.

Each element is read once for all of them, and what only they read is not written at all. XLA does that for some; for
others, such as a gradient behind its mask and the sums over it, it runs two kernels. ResNet-50 with 64 images: 3.3 % of
a step on a V100, 4.6 % on an H200.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.precedence import precedence
from memplan.planning.problem import Problem
from memplan.xla.module import (
    Array,
    Computation,
    Instruction,
    Module,
    Names,
    Shape,
    read_instruction,
    spelled,
    with_loops,
)
from memplan.xla.rewrites.fusion import (
    AFTER,
    CHEAP,
    LEAST_BYTES,
    NAMING,
    calling,
    fused_text,
    is_open,
    readers_of,
    renamed,
    results_of,
    returning,
    rewritten,
    source,
)
from memplan.xla.rewrites.rounding import keeps_bits, narrowest, one_by_one

MOST_ARRAYS = 96  # operands and results of a fusion (`MaxOperandsAndOutputsPerFusion`)
MOST_SUMS = 8  # reductions of a fusion: a tile of 4 KiB each, of the 48 KiB of shared memory that every GPU has
MOST = 0.7  # of the room: ResNet-50 at 30 % takes 141 ms so, 144 with 0.9, 145 with 0.5
_INSIDE = CHEAP | {"reduce", "tuple"}


@dataclass(frozen=True)
class Merged:
    """A module with fusions merged.

    Attributes:
      reads: of every fusion that was merged, by name, the large buffers that others of its group read, clones apart.
    """

    module: Module
    reads: Mapping[str, frozenset[str]]


def merged(module: Module, problem: Problem, room_nbytes: int, clones: Mapping[str, str] | None = None) -> Merged:
    """The module with such fusions as one.

    Args:
      problem: the module's, by `problem_of`.
      room_nbytes: what temporaries may take; fusions that would crowd it stay apart.
      clones: fusions, and those that they repeat: only these are merged, with what is nearer to them than that.
    """
    names, before, shared = Names(module), _by_name(problem), _shared(problem)
    texts: Mapping[str, str] = module.texts
    reads: dict[str, frozenset[str]] = {}
    for body in with_loops(module, module.entry):
        groups, line_up = _Grouping(module, body, before, shared, int(MOST * room_nbytes), clones).run()
        if groups:
            texts = _Writing(body, names, groups, line_up).texts(texts)
        for group in groups:
            for one in group:
                others = [other for other in group if other is not one and other.op.name not in (clones or ())]
                if others:
                    reads[one.op.name] = frozenset(read for other in others for read in other.reads)
    return Merged(Module(module.head, texts, module.entry_name, module) if texts is not module.texts else module, reads)


def _by_name(problem: Problem) -> Mapping[str, list[str]]:
    """Of every kernel, those that have to stay in front of it."""
    name = [kernel.name for kernel in problem.kernels]
    return {name[number]: [name[one] for one in before] for number, before in precedence(problem).items()}


Touched = tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]


def _shared(problem: Problem) -> Mapping[str, Touched]:
    """Of every kernel, what it reads and what it writes in places of several buffers: place and buffer."""
    place = [buffer.place for buffer in problem.buffers]
    several = [len(problem.places[one]) > 1 for one in place]

    def of(buffers: Sequence[int]) -> frozenset[tuple[int, int]]:
        return frozenset((place[buffer], buffer) for buffer in buffers if several[buffer])

    return {kernel.name: (of(kernel.reads), of(kernel.writes)) for kernel in problem.kernels}


@dataclass(frozen=True)
class _Fusion:
    """What may be merged.

    Attributes:
      space: dimensions and layout of the array whose elements it goes through.
      sums: of its reductions, what they are over, along what, and what they make.
      reads: large buffers that it reads, and their bytes.
      makes: its results as buffers.
    """

    op: Instruction
    fused: Computation
    space: tuple[tuple[int, ...], str]
    sums: tuple[tuple[str, str, str], ...]
    reads: Mapping[str, int]
    makes: tuple[str, ...]

    @property
    def arrays(self) -> int:
        return len(self.op.operands) + len(self.makes)


def _fusion(module: Module, body: Computation, op: Instruction) -> _Fusion | None:
    """An open fusion that goes through one array, element by element, and maybe sums them up."""
    if not is_open(op) or op.root:
        return None
    fused = module[op.called[0]]
    if len(fused.results) != len(op.result) or any(one.opcode not in _INSIDE for one in fused.ops.values()):
        return None
    if isinstance(op.shape, tuple) and any(user.opcode != "get-tuple-element" for user, _ in body.uses[op.name]):
        return None
    spaces, sums = set[tuple[tuple[int, ...], str]](), list[tuple[str, str, str]]()
    for result in fused.results:
        maker = fused.behind_bitcasts(result)
        if maker.opcode == "reduce":
            operand = fused.ops[maker.operands[0]]
            along = maker.attributes.partition("dimensions={")[2].partition("}")[0]
            sums.append((str(operand.shape), along, spelled(maker.shape)))
            maker = fused.behind_bitcasts(operand)
        elif maker.opcode == "parameter":
            return None
        if not isinstance(maker.shape, Array):
            return None
        spaces.add((maker.shape.dims, maker.shape.layout))
    reductions = sum(one.opcode == "reduce" for one in fused.ops.values())
    if len(spaces) != 1 or reductions != len(sums) or bool(sums) != (op.attribute("kind") == "kInput"):
        return None
    reads = {source(body, name): body.behind_bitcasts(body.ops[name]).nbytes for name in op.operands}
    large = {name: nbytes for name, nbytes in reads.items() if nbytes >= LEAST_BYTES}
    return _Fusion(op, fused, spaces.pop(), tuple(sums), large, results_of(op))


class _Grouping:
    """Which fusions of one computation become one, and in which order its instructions stand then."""

    def __init__(
        self,
        module: Module,
        body: Computation,
        before: Mapping[str, list[str]],
        shared: Mapping[str, Touched],
        most_nbytes: int,
        clones: Mapping[str, str] | None,
    ) -> None:
        self._body, self._shared, self._most_nbytes, self._clones = body, shared, most_nbytes, clones
        fusions = (_fusion(module, body, op) for op in body.ops.values())
        self._fusions = {one.op.name: one for one in fusions if one is not None}
        self._groups = {name: [one] for name, one in self._fusions.items()}
        self._in = {name: name for name in body.ops}  # the group that an instruction is in now
        self._before = {
            op.name: {*op.operands, *(one for one in before.get(op.name, ()) if one in body.ops)}
            for op in body.ops.values()
        }
        self._line_up = list(body.ops)
        self._at = {name: at for at, name in enumerate(self._line_up)}

    def run(self) -> tuple[list[list[_Fusion]], list[str]]:
        """The groups, and names in order: a group is where the last of its fusions is named."""
        for *_, first, second in sorted(self._pairs()):
            one, other = sorted((self._in[first], self._in[second]), key=self._at.__getitem__)
            if one != other and self._may_join(one, other) and self._alike(self._groups[one], self._groups[other]):
                self._join(one, other)
        return [group for group in self._groups.values() if len(group) > 1], [name for name in self._line_up if name]

    def _pairs(self) -> Iterator[tuple[int, int, str, str]]:
        """What merging saves, negative, how far they are apart, and the two."""
        readers = defaultdict[str, list[str]](list)
        for name, one in self._fusions.items():
            for read in one.reads:
                readers[read].append(name)
        saved: dict[tuple[str, str], int] = defaultdict(int)
        for read, names in readers.items():
            maker = read.partition("{")[0]
            nbytes = self._fusions[names[0]].reads[read]
            for number, name in enumerate(names):
                if maker in self._fusions:
                    saved[maker, name] += nbytes
                for later in names[number + 1 :]:
                    saved[name, later] += nbytes
        for (first, second), nbytes in saved.items():
            apart = self._at[second] - self._at[first]
            if self._fusions[first].space == self._fusions[second].space and self._may(first, second, apart):
                yield -nbytes, apart, first, second

    def _may(self, first: str, second: str, apart: int) -> bool:
        """Is one of them a clone, and the other nearer to it than what it repeats?"""
        if self._clones is None:
            return True
        repeated = [name for name in (first, second) if name in self._clones]
        return bool(repeated) and all(apart < self._at[name] - self._at[self._clones[name]] for name in repeated)

    def _may_join(self, one: str, other: str) -> bool:
        """Is no clone brought to what it repeats by way of another?"""
        if self._clones is None:
            return True
        at = {fusion.op.name: self._at[group] for group in (one, other) for fusion in self._groups[group]}
        return all(
            abs(at[name] - there) < at[name] - self._at[self._in[self._clones[name]]]
            for name in at
            if name in self._clones
            for there in at.values()
        )

    def _alike(self, ones: Sequence[_Fusion], others: Sequence[_Fusion]) -> bool:
        """Do they go through the same elements, does none wait for another's sums, and does every bit stay?"""
        both = [*ones, *others]
        sums = [one for fusion in both for one in fusion.sums]
        if len({fusion.space for fusion in both}) > 1 or len(set(sums)) > 1 or len(sums) > MOST_SUMS:
            return False
        if sum(fusion.arrays for fusion in both) > MOST_ARRAYS or self._nbytes(both) > self._most_nbytes:
            return False
        if (sums and not self._sums_in_order(both)) or self._overwritten(ones, others):
            return False
        made = {name: (fusion.fused, leaf) for fusion in both for leaf, name in enumerate(fusion.makes)}
        given = {source(self._body, operand) for fusion in both for operand in fusion.op.operands}
        for fused, leaf in (made[name] for name in given & made.keys()):
            result = fused.results[leaf]
            if fused.behind_bitcasts(result).opcode == "reduce" or not keeps_bits(fused, result):
                return False
        return True

    def _overwritten(self, ones: Sequence[_Fusion], others: Sequence[_Fusion]) -> bool:
        """Is something written over that the other reads? As one, they do so at the same time."""
        for one in ones:
            for other in others:
                (read, written), (late_read, late_written) = self._shared[one.op.name], self._shared[other.op.name]
                pairs = (*itertools.product(read, late_written), *itertools.product(written, late_read | late_written))
                if any(place == same and buffer != version for (place, buffer), (same, version) in pairs):
                    return True
        return False

    def _sums_in_order(self, group: Sequence[_Fusion]) -> bool:
        """Do sums add up in the order in which they do by themselves?"""
        return len(set(map(self._narrowest, group))) == 1 and not any(one_by_one(fusion.fused) for fusion in group)

    def _nbytes(self, group: Sequence[_Fusion]) -> int:
        """What is there while they run as one."""
        made = {name for fusion in group for name in fusion.makes}
        reads = {name: nbytes for fusion in group for name, nbytes in fusion.reads.items() if name not in made}
        return sum(reads.values()) + sum(fusion.op.nbytes for fusion in group)

    def _narrowest(self, fusion: _Fusion) -> tuple[int, int]:
        return narrowest(fusion.op, (self._body.ops[name] for name in fusion.op.operands))

    def _join(self, one: str, other: str) -> None:
        """Make two groups one, under the later one's name, unless what waits for one is waited for by the other."""
        begin, end = self._at[one], self._at[other]
        ahead = self._ahead(one, other)
        if ahead is None:
            return
        between = [name for name in self._line_up[begin + 1 : end] if name]
        behind = self._behind(one, between) if self._made(ahead) >= LEAST_BYTES else None
        if behind is not None and self._made(behind) <= self._made(ahead):
            line_up = [*_without(between, behind), other, *behind]
        else:
            line_up = [*ahead, other, *_without(between, ahead)]
        line_up = [""] * (end + 1 - begin - len(line_up)) + line_up  # so that those behind it keep their positions
        self._line_up[begin : end + 1] = line_up
        self._at.update((name, at) for at, name in enumerate(line_up, begin))
        self._groups[other] = self._groups.pop(one) + self._groups[other]
        self._before[other] = self._before[one] | {name for name in self._before[other] if not self._names(name, one)}
        for fusion in self._groups[other]:
            self._in[fusion.op.name] = other

    def _ahead(self, one: str, other: str) -> list[str] | None:
        """What the later one waits for behind the earlier one; None where some of that waits for the earlier one."""
        begin, found, todo = self._at[one], set[str](), [other]
        while todo:
            name = todo.pop()
            for before in {self._in[before] for before in self._before[name]}:
                if self._at[before] < begin or before in found:
                    continue
                if not self._names(before, one):
                    found.add(before)
                    todo.append(before)
                elif name != other:
                    return None
        return sorted(found, key=self._at.__getitem__)

    def _behind(self, one: str, between: Sequence[str]) -> list[str]:
        """What waits for the earlier one."""
        waiting, found = {one}, list[str]()
        for name in between:
            if not waiting.isdisjoint({self._in[before] for before in self._before[name]}):
                waiting.add(name)
                found.append(name)
        return found

    def _names(self, name: str, group: str) -> bool:
        """Is it the group, or a name of one of its results?"""
        while self._in[name] != group:
            op = self._body.ops[name]
            if op.opcode not in NAMING:
                return False
            name = op.operands[0]
        return True

    def _made(self, names: Sequence[str]) -> int:
        """Bytes of what kernels make."""
        return sum(self._body.ops[name].nbytes for name in names if self._body.ops[name].opcode not in NAMING)


class _Joined:
    """The inside of several fusions as one.

    Attributes:
      parameters, operands: of the whole.
      made: of every result the instruction.
    """

    def __init__(self, body: Computation, names: Names, group: Sequence[_Fusion]) -> None:
        self._body, self._names = body, names
        self.parameters: list[tuple[str, Shape]] = []
        self.operands: list[str] = []
        self.made: dict[str, Instruction] = {}
        self._ops: dict[str, Instruction] = {}
        self._given: dict[str, tuple[str, Shape]] = {}  # of every buffer that is read
        for fusion in group:
            self._take(fusion)

    def making(self, results: Sequence[str]) -> list[Instruction]:
        """The instructions that make these results, in order."""
        wanted = {self.made[result].name for result in results}
        for op in reversed(self._ops.values()):
            if op.name in wanted:
                wanted.update(op.operands)
        return [op for op in self._ops.values() if op.name in wanted]

    def _take(self, fusion: _Fusion) -> None:
        now: dict[str, str] = {}
        for op in fusion.fused.ops.values():
            if op.opcode == "parameter":
                now[op.name] = self._read(fusion.op.operands[int(op.attributes)], op)
            elif op.opcode != "tuple":
                now[op.name] = fresh = self._names.fresh(op.name, "all")
                line = op.written(fresh, [now[operand] for operand in op.operands])
                self._ops[fresh] = read_instruction(line.replace("  ROOT %", "  %", 1))
        for name, result in zip(fusion.makes, fusion.fused.results, strict=True):
            if now[result.name] in self._ops:
                self.made[name] = self._ops[now[result.name]]

    def _read(self, operand: str, op: Instruction) -> str:
        """What gives a parameter's value: what an earlier fusion made, an earlier parameter, or a new one."""
        buffer = source(self._body, operand)
        if buffer in self.made:
            given = self.made[buffer].name, self.made[buffer].shape
        elif buffer in self._given:
            given = self._given[buffer]
        else:
            name = self._names.fresh(op.name, "all")
            self.operands.append(operand)
            self.parameters.append((name, op.shape))
            given = self._given[buffer] = name, op.shape
        if given[1] == op.shape:
            return given[0]
        view = self._names.fresh(f"{op.name}.view", "all")
        self._ops[view] = read_instruction(f"  %{view} = {spelled(op.shape)} bitcast(%{given[0]})")
        return view


class _Writing:
    """A computation with groups of fusions as one each."""

    def __init__(
        self, body: Computation, names: Names, groups: Sequence[Sequence[_Fusion]], line_up: list[str]
    ) -> None:
        self._body, self._names, self._line_up = body, names, line_up
        self._new: dict[str, str] = {}  # texts of new computations
        self._lines: dict[str, list[Instruction]] = {}  # of every group, in the place of its last fusion
        self._elements: dict[str, tuple[str, int]] = {}  # results of merged fusions -> where they are now
        self._instead: dict[str, str] = {}
        for group in groups:
            self._write(group)

    def texts(self, texts: Mapping[str, str]) -> dict[str, str]:
        """All computations, with those that are new in front of this one."""
        first, *_, last = self._body.text.split("\n")
        text = "\n".join([first, *self._kept(), last])
        return rewritten(texts, self._body.name, text, self._new)

    def _kept(self) -> list[str]:
        """Lines in order, but for names of what is not named any more."""
        ops = [self._now(op) for name in self._line_up for op in self._lines.get(name) or [self._body.ops[name]]]
        used, kept = set[str](), list[str]()
        for op in reversed(ops):
            if op.opcode not in NAMING or op.root or op.name in used:
                used.update(op.operands)
                kept.append(AFTER.sub("", op.line))
        return kept[::-1]

    def _now(self, op: Instruction) -> Instruction:
        """An instruction that reads what is there now."""
        if op.opcode == "get-tuple-element" and (found := self._elements.get(f"{op.operands[0]}{{{op.index}}}")):
            name, number = found
            return read_instruction(f"  %{op.name} = {spelled(op.shape)} get-tuple-element(%{name}), index={number}")
        return read_instruction(renamed(op, self._instead)) if not self._instead.keys().isdisjoint(op.operands) else op

    def _write(self, group: Sequence[_Fusion]) -> None:
        """One fusion, in the manner of the one that sums."""
        base = next((one for one in reversed(group) if one.sums), group[-1]).op
        name, called = self._names.fresh(base.name, "all"), self._names.fresh(base.called[0], "all")
        joined = _Joined(self._body, self._names, group)
        members = {one.op.name for one in group}
        read = [result for one in group for result in one.makes if self._readers(one.op, result) - members]
        results = [joined.made[result] for result in read]
        ops = returning(joined.making(read), results, self._names.fresh(f"{called}.tuple", "all"))
        self._new[called] = fused_text(called, joined.parameters, ops)
        fusion = read_instruction(calling(base, name, ops[-1].shape, joined.operands, called))
        self._lines[group[-1].op.name] = lines = [fusion]
        for number, result in enumerate(read):
            lines += self._named(result, fusion, number)

    def _readers(self, op: Instruction, result: str) -> set[str]:
        found = readers_of(self._body, op, result)
        return {""} if found is None else found

    def _named(self, result: str, fusion: Instruction, number: int) -> Iterator[Instruction]:
        """Where a result is now, and what names it if nothing did."""
        maker, tuple_element, _ = result.partition("{")
        if tuple_element and isinstance(fusion.shape, tuple):
            self._elements[result] = fusion.name, number
        elif tuple_element:
            users = (user for user, _ in self._body.uses[maker] if source(self._body, user.name) == result)
            self._instead.update((user.name, fusion.name) for user in users)
        elif isinstance(fusion.shape, tuple):
            element, shape = self._names.fresh(result, "all"), spelled(fusion.shape[number])
            line = f"  %{element} = {shape} get-tuple-element(%{fusion.name}), index={number}"
            yield read_instruction(line)
            self._instead[result] = element
        else:
            self._instead[result] = fusion.name


def _without(names: Sequence[str], others: Collection[str]) -> list[str]:
    left_out = set(others)
    return [name for name in names if name not in left_out]
