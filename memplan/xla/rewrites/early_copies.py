"""A scheduled module -> one whose loops copy beside all of a trip: begun as soon, awaited as late as can be.

XLA's scheduler guesses what kernels take, and begins a copy from host memory as late as it may by that guess. Where a
trip has one long convolution it begins behind that, and the loop waits for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.rewrites.fusion import NAMING, predecessors

_NAMING = NAMING | {"opt-barrier", "tuple"}


def copy_early(module: Module) -> Module:
    """The module with the copies between host and device in the loops of its entry moved so, and nothing else."""
    bodies = {name for op in module.entry.ops.values() if op.opcode == "while" for name in op.called}
    moved = {name: module[name].text_with(op.line for op in _ordered(module[name])) for name in bodies}
    return module.with_texts({**module.texts, **moved})


def _ordered(body: Computation) -> Iterator[Instruction]:
    """What begins a copy as soon as it may, what waits for one when nothing else is left, the others as they were."""
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
    """What makes a value, looked through names of it; of a copy what begins it, too."""
    op = body.ops[name]
    while op.opcode in _NAMING and op.operands:
        op = body.ops[op.operands[0]]
    return [op.name, *(op.operands if op.opcode.endswith("-done") else ())]


def _readers(body: Computation, name: str) -> Iterator[str]:
    """Who reads a value, by whichever name."""
    for user, _ in body.uses[name]:
        if user.opcode in _NAMING and not user.root:
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
