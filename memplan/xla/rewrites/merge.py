"""A scheduled module -> one in which siblings, and producers with consumers, are merged fusions.

This is XLA's multi-output fusion: it reads each element once for all of them, and does not write
values that only they read. XLA merges some; others, such as a gradient after its mask and the sums
over it, it runs as two kernels. ResNet-50 with 64 images: 3.3 % of a step on a V100, 4.6 % on an
H200.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.planning.problem import Problem
from memplan.xla.edit import Edit, bitcast, tuple_element
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.rewrites.fusion import (
    BodyChanges,
    backward_slice,
    buffer_of,
    new_fusion,
    readers_of,
    with_root,
    without_unread_aliases,
)
from memplan.xla.rewrites.fusion_groups import FusionGroups, Mergeable, constraints_of
from memplan.xla.shapes import Shape

MERGED_SHARE = 0.7
"""A merged fusion takes at most this share of the room. ResNet-50 at 30 % takes 141 ms so, 144 with
0.9, 145 with 0.5. It is below `split.WHOLE_SHARE`, so that a merged fusion is not split again.
"""


@dataclass(frozen=True)
class Merged:
    """A module with fusions merged."""

    module: Module
    # merged fusion, by name -> large buffers that other fusions of its group read, without clones
    reads: Mapping[str, frozenset[str]]


def merge_fusions(
    module: Module, problem: Problem, room_nbytes: int, originals: Mapping[str, str] | None = None
) -> Merged:
    """The module with such fusions merged.

    Args:
      problem: the module's, by `problem_of`.
      room_nbytes: budget of temporaries; fusions that would crowd it are not merged.
      originals: clone -> the fusion that it recomputes. Only clones are merged, and only with a
        fusion closer than their original.
    """
    constraints = constraints_of(problem)
    clones = originals or {}
    edit = Edit(module)
    reads: dict[str, frozenset[str]] = {}
    most_nbytes = int(MERGED_SHARE * room_nbytes)
    for body in with_blocks(module, module.entry):
        groups, order = FusionGroups(module, body, constraints, most_nbytes, originals).merge()
        if groups:
            _merge_groups(body, edit, groups, order)
        for group in groups:
            reads.update(_sibling_reads(group, clones))
    return Merged(edit.module, reads)


def _sibling_reads(
    group: Sequence[Mergeable],
    clones: Collection[str],
) -> Iterator[tuple[str, frozenset[str]]]:
    """Every fusion of a group that has siblings beside clones, and the large buffers they read."""
    plain = [fusion for fusion in group if fusion.op.name not in clones]
    for fusion in group:
        siblings = [sibling for sibling in plain if sibling is not fusion]
        if siblings:
            yield fusion.op.name, frozenset[str]().union(*(sibling.reads for sibling in siblings))


def _merge_groups(
    body: Computation,
    edit: Edit,
    groups: Sequence[Sequence[Mergeable]],
    order: Sequence[str],
) -> None:
    """Merge groups of fusions of a computation, and put its instructions in this order."""
    changes = BodyChanges()
    for group in groups:
        _merge_group(body, edit, group, changes)
    ops = without_unread_aliases(changes.ops(body, order))
    # the order already implies control edges
    edit.replace(body.with_ops(op.changed(ordered=False) for op in ops), changes.callees)


def _merge_group(
    body: Computation,
    edit: Edit,
    group: Sequence[Mergeable],
    changes: BodyChanges,
) -> None:
    """One fusion, of the kind of the one that sums, at the position of the last."""
    base = next((fusion for fusion in reversed(group) if fusion.sums), group[-1]).op
    name = edit.fresh(base.name, "all")
    called = edit.fresh(base.called[0], "all")
    merged = _MergedBody(body, edit)
    for member in group:
        merged.add(member)
    names = {member.op.name for member in group}
    results: list[str] = []
    for member in group:
        for result in member.makes:
            if _is_read_by_others(body, member.op, result, names):
                results.append(result)
    values = [merged.values[result] for result in results]
    producers = backward_slice(merged.ops, [value.name for value in values])
    ops = with_root(producers, values, edit.fresh(f"{called}.tuple", "all"))
    fusion, fused = new_fusion(base, name, called, merged.operands, merged.parameters, ops)
    changes.callees.append(fused)
    elements: list[Instruction] = []
    for index, result in enumerate(results):
        elements += _redirect(body, edit, result, fusion, index, changes)
    changes.replaced[group[-1].op.name] = [fusion, *elements]


def _is_read_by_others(body: Computation, op: Instruction, result: str, names: set[str]) -> bool:
    """Does anything but these fusions read a result?"""
    readers = readers_of(body, op, result)
    return readers is None or not readers <= names


def _redirect(
    body: Computation,
    edit: Edit,
    result: str,
    fusion: Instruction,
    index: int,
    changes: BodyChanges,
) -> list[Instruction]:
    """Let the readers of a result read the merged fusion.

    Returns:
      An element of its tuple, if none named the result.
    """
    producer, is_element, _ = result.partition("{")
    elements = [user for user, _ in body.uses[producer] if buffer_of(body, user.name) == result]
    if not isinstance(fusion.shape, tuple):
        aliases = [element.name for element in elements] if is_element else [result]
        changes.renamed.update((alias, fusion.name) for alias in aliases)
        return []
    if is_element:
        for element in elements:
            moved = tuple_element(element.name, element.shape, fusion.name, index)
            changes.replaced[element.name] = [moved]
        return []
    element = tuple_element(edit.fresh(result, "all"), fusion.shape[index], fusion.name, index)
    changes.renamed[result] = element.name
    return [element]


@dataclass
class _MergedBody:
    """The computation of a merged fusion, while fusions are added to it."""

    body: Computation  # in which the fusions are
    edit: Edit
    operands: list[str] = field(default_factory=list)  # of the merged fusion
    # name and shape, of every operand
    parameters: list[tuple[str, Shape]] = field(default_factory=list)
    ops: dict[str, Instruction] = field(default_factory=dict)  # without parameters
    values: dict[str, Instruction] = field(default_factory=dict)  # result -> its instruction
    # buffer of an operand -> its parameter
    parameter_of: dict[str, tuple[str, Shape]] = field(default_factory=dict)

    def add(self, fusion: Mergeable) -> None:
        names: dict[str, str] = {}  # instruction of the fusion -> the merged one's
        for op in fusion.fused.ops.values():
            if op.opcode == "parameter":
                operand = fusion.op.operands[op.parameter_number]
                names[op.name] = self._parameter(operand, op)
            elif op.opcode != "tuple":
                name = self.edit.fresh(op.name, "all")
                operands = [names[operand] for operand in op.operands]
                self.ops[name] = op.changed(name=name, operands=operands, root=False)
                names[op.name] = name
        for buffer, result in zip(fusion.makes, fusion.fused.results, strict=True):
            if names[result.name] in self.ops:
                self.values[buffer] = self.ops[names[result.name]]

    def _parameter(self, operand: str, op: Instruction) -> str:
        """A parameter's value: an earlier fusion's result, an earlier parameter, or a new one."""
        buffer = buffer_of(self.body, operand)
        if buffer in self.values:
            name = self.values[buffer].name
            shape = self.values[buffer].shape
        elif buffer in self.parameter_of:
            name, shape = self.parameter_of[buffer]
        else:
            name = self.edit.fresh(op.name, "all")
            shape = op.shape
            self.operands.append(operand)
            self.parameters.append((name, shape))
            self.parameter_of[buffer] = name, shape
        if shape == op.shape:
            return name
        view = self.edit.fresh(f"{op.name}.view", "all")
        self.ops[view] = bitcast(view, op.shape, name)
        return view
