"""A scheduled module -> one whose loops start copies early and wait for them late, during the trip.

XLA's scheduler guesses the seconds of kernels, and by that guess starts a copy from host memory as
late as possible. If a trip has one long convolution, the copy starts after it, and the loop waits.

XLA also computes the next trip's number and the offset of the slab to fetch in one fusion. The
number overwrites this trip's, so the fusion, and with it the copy, would run after all readers of
this number: the offset is computed separately.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from memplan.xla.edit import Edit
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.rewrites.fusion import NAMING, BodyChanges, is_open, slice_fusion

# Opcodes whose results are their operands' buffers.
_ALIASES = NAMING | {"opt-barrier", "tuple"}


def copy_early(module: Module) -> Module:
    """The module with the host copies in its loops moved, and nothing else changed."""
    edit = Edit(module)
    loops = (op for op in module.instructions.values() if op.opcode == "while")
    # in the order of the loops, on which new names depend
    for name in dict.fromkeys(name for op in loops for name in op.called):
        changes = _Offsets(module, module[name], edit).changes()
        body = module[name].with_ops(changes.ops(module[name]))
        edit.replace(body.with_ops(_ordered(body)), changes.callees)
    return edit.module


def _ordered(body: Computation) -> Iterator[Instruction]:
    """Start copies as early and wait for them as late as possible; keep the order of kernels."""
    ops = list(body.ops.values())
    starts = {op.name for op in ops if op.opcode.endswith("-start") and _touches_host(op)}
    early = _with_producers(body, starts)
    ranks = [_rank(op, starts, early) for op in ops]
    positions = {op.name: position for position, op in enumerate(ops)}
    readers = _readers_before_writers(body, positions)
    missing: list[int] = []  # predecessors of each instruction that have not run
    successors = defaultdict[int, list[int]](list)
    for position, op in enumerate(ops):
        names = (*op.operands, *op.predecessors, *readers[op.name])
        predecessors = {positions[name] for name in names}
        missing.append(len(predecessors))
        for predecessor in predecessors:
            successors[predecessor].append(position)
    ready = [(ranks[position], position) for position, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, position = heapq.heappop(ready)
        yield ops[position]
        for successor in successors[position]:
            missing[successor] -= 1
            if not missing[successor]:
                heapq.heappush(ready, (ranks[successor], successor))


def _rank(op: Instruction, starts: Collection[str], early: Collection[str]) -> int:
    """Among instructions that may run, the lowest rank runs first."""
    if op.name in early:
        return 0
    return 2 if op.opcode.endswith("-done") and op.operands[0] in starts else 1


class _Offsets:
    """Computes the offset of a loop's copy separately, if the copy would have to wait for it."""

    def __init__(self, module: Module, body: Computation, edit: Edit) -> None:
        self._module = module
        self._body = body
        self._edit = edit
        positions = {op.name: position for position, op in enumerate(body.ops.values())}
        ordered = {op.name for op in body.ops.values() if op.predecessors}
        self._waiting = ordered | set(_readers_before_writers(body, positions))
        self._separate: dict[str, str] = {}  # number -> the new instruction that computes it alone
        self._inserted: dict[str, list[Instruction]] = {}  # an instruction -> new ones before it
        self._callees: list[Computation] = []

    def changes(self) -> BodyChanges:
        """A new instruction precedes its original, which overwrites their common operand."""
        starts = [op for op in self._body.ops.values() if op.opcode == "fusion-start"]
        host_starts = [op for op in starts if _touches_host(op)]
        offsets = {name: self._separately(name) for op in host_starts for name in op.operands}
        changes = BodyChanges(callees=self._callees)
        for op in self._body.ops.values():
            new_op = op.with_operands(offsets) if op.opcode == "fusion-start" else op
            inserted = self._inserted.get(op.name, [])
            if inserted or new_op is not op:
                changes.replaced[op.name] = [*inserted, new_op]
        return changes

    def _separately(self, name: str) -> str:
        """The name of an offset that depends on nothing but its own operands."""
        op = self._body.ops[name]
        is_element = op.opcode == "get-tuple-element"
        producer = self._body.ops[op.operands[0]] if is_element else op
        if name in self._separate or not self._is_arithmetic(producer):
            return self._separate.get(name, name)
        operands = {operand: self._separately(operand) for operand in producer.operands}
        is_changed = any(old != new for old, new in operands.items())
        if producer.name not in self._waiting and not is_changed:
            return name
        called = self._edit.fresh(producer.called[0], "alone")
        leaf = op.index if is_element else 0
        fusion, fused = slice_fusion(
            producer,
            self._module[producer.called[0]],
            [leaf],
            self._edit.fresh(producer.name, "alone"),
            called,
            self._edit,
        )
        self._callees.append(fused)
        inserted = self._inserted.setdefault(producer.name, [])
        inserted.append(fusion.with_operands(operands).changed(ordered=False))
        self._separate[name] = fusion.name
        return fusion.name

    def _is_arithmetic(self, op: Instruction) -> bool:
        """Is it a fusion of scalars?"""
        operands = (array for name in op.operands for array in self._body.ops[name].result)
        return is_open(op) and not any(array.dims for array in (*op.result, *operands))


def _readers_before_writers(
    body: Computation,
    positions: Mapping[str, int],
) -> Mapping[str, Collection[str]]:
    """Producer of an element of the next carry -> readers of the element that it overwrites."""
    readers = defaultdict[str, list[str]](list)
    for element in body.ops.values():
        if element.opcode != "get-tuple-element" or not _is_carry(body, element):
            continue
        writers = _producers(body, body.root.operands[element.index])
        for reader in _readers(body, element.name):
            for writer in writers:
                if positions[reader] < positions[writer]:
                    readers[writer].append(reader)
    return readers


def _is_carry(body: Computation, element: Instruction) -> bool:
    return body.root.opcode == "tuple" and body.ops[element.operands[0]].opcode == "parameter"


def _producers(body: Computation, name: str) -> list[str]:
    """The producer of a value, behind aliases of it; for a copy also its start."""
    op = body.ops[name]
    while op.opcode in _ALIASES and op.operands:
        op = body.ops[op.operands[0]]
    return [op.name, *(op.operands if op.opcode.endswith("-done") else ())]


def _readers(body: Computation, name: str) -> Iterator[str]:
    """The readers of a value, behind aliases; an asynchronous start reads until its end."""
    for user, _ in body.uses[name]:
        if user.opcode.endswith("-start") or (user.opcode in _ALIASES and not user.root):
            yield from _readers(body, user.name)
        yield user.name


def _with_producers(body: Computation, names: Collection[str]) -> set[str]:
    """These instructions and all their producers."""
    producers = set[str]()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in producers:
            producers.add(name)
            stack += body.ops[name].operands
    return producers


def _touches_host(op: Instruction) -> bool:
    return any(array.on_host for array in op.result)
