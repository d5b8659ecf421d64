"""A scheduled module -> one in which sibling fusions, and producers with their consumers, are merged.

This is XLA's multi-output fusion: it reads each element once for all of them, and does not write values that only they
read. XLA merges some; others, such as a gradient after its mask and the sums over it, it runs as two kernels.
ResNet-50 with 64 images: 3.3 % of a step on a V100, 4.6 % on an H200.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.problem import Problem
from memplan.xla.module import Computation, Instruction, Module, Names, read_instruction, with_blocks
from memplan.xla.rewrites.fusion import (
    AFTER,
    NAMING,
    backward_slice,
    bitcast,
    buffer_of,
    insert,
    new_fusion,
    readers_of,
    rename_operands,
    tuple_element,
    with_root,
)
from memplan.xla.rewrites.fusion_groups import FusionGroups, Mergeable, constraints_of
from memplan.xla.shapes import Shape

MERGED_SHARE = 0.7
"""Of the room: the most that a merged fusion may take. ResNet-50 at 30 % takes 141 ms so, 144 with 0.9, 145 with 0.5.
It is below `split.WHOLE_SHARE`, so that a merged fusion is not split again.
"""


@dataclass(frozen=True)
class Merged:
    """A module with fusions merged."""

    module: Module
    # merged fusion, by name -> large buffers that others of its group read, without clones
    reads: Mapping[str, frozenset[str]]


def merge_fusions(
    module: Module, problem: Problem, room_nbytes: int, originals: Mapping[str, str] | None = None
) -> Merged:
    """The module with such fusions merged.

    Args:
      problem: the module's, by `problem_of`.
      room_nbytes: budget of temporaries; fusions that would crowd it are not merged.
      originals: clone -> the fusion that it recomputes. Only clones are merged, and only with a fusion closer than
        their original.
    """
    names, constraints, clones = Names(module), constraints_of(problem), originals or {}
    texts, reads = module.texts, dict[str, frozenset[str]]()
    for body in with_blocks(module, module.entry):
        groups, order = FusionGroups(module, body, constraints, int(MERGED_SHARE * room_nbytes), originals).merge()
        if groups:
            texts = _BodyRewriter(body, names, groups, order).texts(texts)
        for group in groups:
            for one in group:
                others = [other for other in group if other is not one and other.op.name not in clones]
                if others:
                    reads[one.op.name] = frozenset(read for other in others for read in other.reads)
    return Merged(module.with_texts(texts), reads)


class _FusedBody:
    """The body of several fusions, merged.

    Attributes:
      parameters, operands: of the merged fusion.
      made: result -> its instruction.
    """

    def __init__(self, body: Computation, names: Names, group: Sequence[Mergeable]) -> None:
        self._body, self._names = body, names
        self.parameters: list[tuple[str, Shape]] = []
        self.operands: list[str] = []
        self.made: dict[str, Instruction] = {}
        self._ops: dict[str, Instruction] = {}
        self._given: dict[str, tuple[str, Shape]] = {}  # of every buffer that is read
        for fusion in group:
            self._add(fusion)

    def slice(self, results: Sequence[str]) -> list[Instruction]:
        """The instructions that make these results, in order."""
        return backward_slice(self._ops, (self.made[result].name for result in results))

    def _add(self, fusion: Mergeable) -> None:
        now: dict[str, str] = {}
        for op in fusion.fused.ops.values():
            if op.opcode == "parameter":
                now[op.name] = self._value(fusion.op.operands[int(op.attributes)], op)
            elif op.opcode != "tuple":
                now[op.name] = fresh = self._names.fresh(op.name, "all")
                line = op.line_with(fresh, [now[operand] for operand in op.operands])
                self._ops[fresh] = read_instruction(line.replace("  ROOT %", "  %", 1))
        for name, result in zip(fusion.makes, fusion.fused.results, strict=True):
            if now[result.name] in self._ops:
                self.made[name] = self._ops[now[result.name]]

    def _value(self, operand: str, op: Instruction) -> str:
        """The value of a parameter: an earlier fusion's result, an earlier parameter, or a new one."""
        buffer = buffer_of(self._body, operand)
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
        self._ops[view] = bitcast(view, op.shape, given[0])
        return view


class _BodyRewriter:
    """A computation with its groups of fusions merged."""

    def __init__(
        self, body: Computation, names: Names, groups: Sequence[Sequence[Mergeable]], order: Sequence[str]
    ) -> None:
        self._body, self._names, self._order = body, names, order
        self._new: dict[str, str] = {}  # texts of new computations
        self._lines: dict[str, list[Instruction]] = {}  # lines of every group, at the position of its last fusion
        self._elements: dict[str, tuple[str, int]] = {}  # results of merged fusions -> their new places
        self._instead: dict[str, str] = {}
        for group in groups:
            self._merge(group)

    def texts(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """All computations, the new ones before this one."""
        return insert(texts, self._body.name, self._body.text_with(self._kept()), self._new)

    def _kept(self) -> list[str]:
        """Lines in order, without aliases that are no longer read."""
        ops = [self._now(op) for name in self._order for op in self._lines.get(name) or [self._body.ops[name]]]
        used, kept = set[str](), list[str]()
        for op in reversed(ops):
            if op.opcode not in NAMING or op.root or op.name in used:
                used.update(op.operands)
                kept.append(AFTER.sub("", op.line))
        return kept[::-1]

    def _now(self, op: Instruction) -> Instruction:
        """An instruction that reads the new places."""
        if op.opcode == "get-tuple-element" and (found := self._elements.get(f"{op.operands[0]}{{{op.index}}}")):
            return tuple_element(op.name, op.shape, *found)
        if self._instead.keys().isdisjoint(op.operands):
            return op
        return read_instruction(rename_operands(op, self._instead))

    def _merge(self, group: Sequence[Mergeable]) -> None:
        """One fusion, of the kind of the one that sums."""
        base = next((one for one in reversed(group) if one.sums), group[-1]).op
        name, called = self._names.fresh(base.name, "all"), self._names.fresh(base.called[0], "all")
        inside = _FusedBody(self._body, self._names, group)
        members = {one.op.name for one in group}
        read = [result for one in group for result in one.makes if self._readers(one.op, result) - members]
        results = [inside.made[result] for result in read]
        ops = with_root(inside.slice(read), results, self._names.fresh(f"{called}.tuple", "all"))
        fusion, self._new[called] = new_fusion(base, name, called, inside.operands, inside.parameters, ops)
        self._lines[group[-1].op.name] = lines = [fusion]
        for number, result in enumerate(read):
            lines += self._name(result, fusion, number)

    def _readers(self, op: Instruction, result: str) -> set[str]:
        found = readers_of(self._body, op, result)
        return {""} if found is None else found

    def _name(self, result: str, fusion: Instruction, number: int) -> Iterator[Instruction]:
        """The new place of a result, and an instruction that names it if none did."""
        maker, element, _ = result.partition("{")
        if element and isinstance(fusion.shape, tuple):
            self._elements[result] = fusion.name, number
        elif element:
            users = (user for user, _ in self._body.uses[maker] if buffer_of(self._body, user.name) == result)
            self._instead.update((user.name, fusion.name) for user in users)
        elif isinstance(fusion.shape, tuple):
            fresh = self._names.fresh(result, "all")
            yield tuple_element(fresh, fusion.shape[number], fusion.name, number)
            self._instead[result] = fresh
        else:
            self._instead[result] = fusion.name
