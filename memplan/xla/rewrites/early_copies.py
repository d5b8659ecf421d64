"""A scheduled module -> one whose loops copy beside all of a trip: begun as soon, awaited as late as can be.

XLA's scheduler guesses what kernels take, and begins a copy from host memory as late as it may by that guess. Where a
trip has one long convolution it begins behind that, and the loop waits for it.

XLA also makes the number of the next trip and the place of what is fetched for it in one fusion. That number is written
over this trip's, so the fusion runs behind all that reads this one, and so would the copy: its place is made alone.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from memplan.xla.module import Computation, Instruction, Module, Names
from memplan.xla.rewrites.fusion import AFTER, NAMING, insert, is_open, predecessors, rename_operands, slice_fusion

_NAMING = NAMING | {"opt-barrier", "tuple"}


def copy_early(module: Module) -> Module:
    """The module with the copies between host and device in the loops of its entry moved so, and nothing else."""
    names, texts = Names(module), module.texts
    loops = (op for op in module.entry.ops.values() if op.opcode == "while")
    for name in dict.fromkeys(name for op in loops for name in op.called):  # in order: so are new names
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
        self._alone: dict[str, str] = {}  # by the number's name, who makes it so
        self._lines: dict[str, list[str]] = {name: [] for name in body.ops}  # what is new before an instruction
        self.fused: dict[str, str] = {}  # texts of what new fusions call

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
        """A fusion of numbers, not of arrays."""
        read = (array for name in op.operands for array in self._body.ops[name].result)
        return is_open(op) and not any(array.dims for array in (*op.result, *read))


def _readers_before_writers(body: Computation, place: Mapping[str, int]) -> Mapping[str, Collection[str]]:
    """By what makes an element of the next carry, who reads the element of this one before: it is written over."""
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
    """Who reads a value, by whichever name; what has begun reads until it is done."""
    for user, _ in body.uses[name]:
        if user.opcode.endswith("-start") or (user.opcode in _NAMING and not user.root):
            yield from _readers(body, user.name)
        yield user.name


def _with_sources(body: Computation, names: Collection[str]) -> set[str]:
    """They, and all that they are made of."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += body.ops[name].operands
    return found


def _touches_host(op: Instruction) -> bool:
    return any(array.on_host for array in op.result)
