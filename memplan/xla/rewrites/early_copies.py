"""A scheduled module -> one whose loops copy during the whole trip: copies start early and are awaited late.

XLA's scheduler guesses the seconds of kernels, and by that guess starts a copy from host memory as late as possible. If
a trip has one long convolution, the copy starts after it, and the loop waits.

XLA also computes the next trip's number and the offset of the slab to fetch in one fusion. The number overwrites this
trip's, so the fusion, and with it the copy, would run after all readers of this number: the offset is computed
separately.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from memplan.xla.module import Computation, Instruction, Module, Names, predecessors
from memplan.xla.rewrites.fusion import AFTER, NAMING, insert, is_open, rename_operands, slice_fusion

_NAMING = NAMING | {"opt-barrier", "tuple"}


def copy_early(module: Module) -> Module:
    """The module with the host copies in its loops moved, and nothing else changed."""
    names, texts = Names(module), module.texts
    loops = (op for op in module.instructions.values() if op.opcode == "while")
    for name in dict.fromkeys(name for op in loops for name in op.called):  # in order, and so are new names
        places = _Places(module, module[name], names)
        body = Computation(name, module[name].text_with(places.lines()), module[name])
        texts = insert(texts, name, body.text_with(op.line for op in _ordered(body)), places.fused)
    return module.with_texts(texts)


def _ordered(body: Computation) -> Iterator[Instruction]:
    """Start copies as early as possible, wait for them as late as possible, and leave the rest in order."""
    ops = list(body.ops.values())
    begins = {op.name for op in ops if op.opcode.endswith("-start") and _touches_host(op)}
    early = _with_sources(body, begins)
    ranks = [0 if op.name in early else 1 + (op.opcode.endswith("-done") and op.operands[0] in begins) for op in ops]
    place = {op.name: number for number, op in enumerate(ops)}
    missing, waiting = list[int](), defaultdict[int, list[int]](list)
    readers = _readers_before_writers(body, place)
    for number, op in enumerate(ops):
        before = {place[name] for name in (*op.operands, *predecessors(op), *readers[op.name])}
        missing.append(len(before))
        for one in before:
            waiting[one].append(number)
    ready = [(ranks[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        yield ops[number]
        for one in waiting[number]:
            missing[one] -= 1
            if not missing[one]:
                heapq.heappush(ready, (ranks[one], one))


class _Places:
    """Offsets at which a loop's copies read or write: computed separately where the copy would have to wait."""

    def __init__(self, module: Module, body: Computation, names: Names) -> None:
        self._module, self._body, self._names = module, body, names
        place = {op.name: number for number, op in enumerate(body.ops.values())}
        ordered = {op.name for op in body.ops.values() if predecessors(op)}
        self._waiting = ordered | set(_readers_before_writers(body, place))
        self._alone: dict[str, str] = {}  # a number -> the new instruction that computes it separately
        self._lines: dict[str, list[str]] = {name: [] for name in body.ops}  # an instruction -> new ones before it
        self.fused: dict[str, str] = {}  # texts of the computations of new fusions

    def lines(self) -> Iterator[str]:
        """Lines of the body. A new instruction precedes its original, which overwrites their common operand."""
        now = {
            name: self._made_alone(name)
            for op in self._body.ops.values()
            if op.opcode == "fusion-start" and _touches_host(op)
            for name in op.operands
        }
        for op in self._body.ops.values():
            yield from self._lines[op.name]
            yield rename_operands(op, now) if op.opcode == "fusion-start" else op.line

    def _made_alone(self, name: str) -> str:
        """The name of an offset that depends on nothing but its own operands."""
        op = self._body.ops[name]
        is_element = op.opcode == "get-tuple-element"
        maker = self._body.ops[op.operands[0]] if is_element else op
        if name in self._alone or not self._is_arithmetic(maker):
            return self._alone.get(name, name)
        now = {one: self._made_alone(one) for one in maker.operands}
        if maker.name not in self._waiting and all(one == other for one, other in now.items()):
            return name
        fused, called = self._module[maker.called[0]], self._names.fresh(maker.called[0], "alone")
        fusion, self.fused[called] = slice_fusion(
            maker, fused, [op.index if is_element else 0], self._names.fresh(maker.name, "alone"), called, self._names
        )
        self._lines[maker.name].append(AFTER.sub("", rename_operands(fusion, now)))
        self._alone[name] = fusion.name
        return fusion.name

    def _is_arithmetic(self, op: Instruction) -> bool:
        """Is it a fusion of scalars?"""
        read = (array for name in op.operands for array in self._body.ops[name].result)
        return is_open(op) and not any(array.dims for array in (*op.result, *read))


def _readers_before_writers(body: Computation, place: Mapping[str, int]) -> Mapping[str, Collection[str]]:
    """For every element of the next carry, by its producer: the readers of the old element, which it overwrites."""
    found = defaultdict[str, list[str]](list)
    elements = [op for op in body.ops.values() if op.opcode == "get-tuple-element" and _is_carry(body, op)]
    for element in elements:
        writers = _begun_by(body, body.root.operands[element.index])
        for reader in _readers(body, element.name):
            for writer in writers:
                if place[reader] < place[writer]:
                    found[writer].append(reader)
    return found


def _is_carry(body: Computation, element: Instruction) -> bool:
    return body.root.opcode == "tuple" and body.ops[element.operands[0]].opcode == "parameter"


def _begun_by(body: Computation, name: str) -> list[str]:
    """The producer of a value, behind aliases of it; for a copy also its start."""
    op = body.ops[name]
    while op.opcode in _NAMING and op.operands:
        op = body.ops[op.operands[0]]
    return [op.name, *(op.operands if op.opcode.endswith("-done") else ())]


def _readers(body: Computation, name: str) -> Iterator[str]:
    """The readers of a value, behind aliases; an asynchronous start reads until its end."""
    for user, _ in body.uses[name]:
        if user.opcode.endswith("-start") or (user.opcode in _NAMING and not user.root):
            yield from _readers(body, user.name)
        yield user.name


def _with_sources(body: Computation, names: Collection[str]) -> set[str]:
    """These instructions and all their producers."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += body.ops[name].operands
    return found


def _touches_host(op: Instruction) -> bool:
    return any(array.on_host for array in op.result)
