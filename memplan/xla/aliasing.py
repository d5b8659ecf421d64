"""Which operands a kernel's result may overwrite at their last read; by backend.

Sources: `FusionCanShareBufferHint` and `CanShareBufferHint` of XLA:GPU; `CanShareOperandBufferWithUser` of
`HloDataflowAnalysis` for XLA:CPU, and for the rest.
"""

import re
from collections import deque
from collections.abc import Iterator

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

ELEMENTWISE = frozenset(
    """
    abs add and atan2 bitcast-convert cbrt ceil clamp count-leading-zeros compare complex convert cosine divide erf
    exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate
    not or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor
    """.split()  # noqa: SIM905
)
"""Elementwise opcodes, as HLO prints them; for rewrites they are cheap (`rewrites.fusion.CHEAP`)."""
_BY_NCCL = frozenset({"all-reduce", "collective-broadcast"})  # in place, if need be
IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{\}\)")


def updated(module: Module, op: Instruction) -> Iterator[tuple[int, str]]:
    """(leaf, operand) pairs that a kernel updates in place: both are one buffer."""
    if op.opcode == "fusion":
        fused = module[op.called[0]]
        for leaf in range(len(op.result)):
            source = _updated_in(fused, leaf)
            if source is not None and source.opcode == "parameter":
                yield leaf, op.operands[int(source.attributes)]
        return
    for leaf, position in _in_place(op).items():
        yield leaf, op.operands[position]


def _in_place(op: Instruction) -> dict[int, int]:
    """Leaf -> position of the operand that it updates."""
    if op.opcode in IN_PLACE:
        return {0: 0}
    return {leaf[0] if leaf else 0: position for leaf, position in aliased_outputs(op)}


def aliased_outputs(op: Instruction) -> Iterator[tuple[tuple[int, ...], int]]:
    """(index of a part of the result, position of an operand) pairs that the instruction says are one buffer."""
    found = _ALIASED.search(op.attributes)
    for index, position in _PAIR.findall(found[1]) if found else ():
        yield tuple(int(one) for one in index.split(",") if one), int(position)


def _updated_in(fused: Computation, leaf: int) -> Instruction | None:
    """The operand that a leaf of a fusion's result updates, behind bitcasts."""
    result = fused.root
    if result.opcode == "tuple":
        result, leaf = fused.behind_bitcasts(fused.by_leaf[leaf]), 0
        if result.opcode == "get-tuple-element":
            result, leaf = fused.ops[result.operands[0]], result.index
    else:
        result = fused.behind_bitcasts(result)
    position = _in_place(result).get(leaf)
    return None if position is None else fused.behind_bitcasts(fused.ops[result.operands[position]])


def may_overwrite(module: Module, op: Instruction, leaf: int, operand: Instruction, on_gpu: bool) -> bool:
    """May a leaf of a kernel's result overwrite an operand, an instruction with one leaf?"""
    if op.opcode == "copy" or not isinstance(operand.shape, Array):
        return False
    source, result = operand.result[0], op.result[leaf]
    if on_gpu and op.opcode == "fusion":
        alike = source.size == result.size and source.bits == result.bits
        return alike and _fused_over(module[op.called[0]], op, leaf, operand.name)
    if op.opcode == "custom-call":
        return False  # a library that adds to an operand says so: that is an update
    if source != result:
        return False
    if op.opcode in _BY_NCCL:
        return on_gpu and (len(op.operands) == 1 or op.operands[leaf] == operand.name)
    if op.opcode == "fusion":
        return "kind=kLoop" in op.attributes and _elementwise_throughout(module[op.called[0]], op, operand.name)
    return op.opcode in ELEMENTWISE and op.operands.count(operand.name) == 1


def _elementwise_throughout(fused: Computation, op: Instruction, operand: str) -> bool:
    """Are all values computed from the parameter computed elementwise? (XLA:CPU)"""
    todo = [fused.parameters[op.operands.index(operand)]]
    while todo:
        for user, _ in fused.uses[todo.pop().name]:
            if user.opcode not in ELEMENTWISE and user.opcode != "tuple":
                return False
            todo.append(user)
    return True


def _fused_over(fused: Computation, op: Instruction, leaf: int, operand: str) -> bool:
    key = op.attribute("kind"), leaf, op.operands.index(operand)
    if key not in fused.alias_cache:
        fused.alias_cache[key] = _is_fused_over(fused, *key)
    return fused.alias_cache[key]


def _is_fused_over(fused: Computation, kind: str, leaf: int, number: int) -> bool:
    """Is every path from the parameter to that result elementwise? (XLA:GPU)"""
    several = fused.root.opcode == "tuple"
    if not several and leaf:
        return False
    result = fused.by_leaf[leaf]
    maker = fused.ops[result.operands[0]] if result.opcode == "bitcast" else result
    reduced = _first_reduction(fused) if kind == "kInput" else None
    start = fused.parameters[number]
    seen, todo, arrived = {start.name}, deque([start]), False
    while todo:
        here = todo.popleft()
        arrived |= here is result
        if here is reduced:
            continue
        for user, _ in fused.uses[here.name]:
            if user.name not in seen:
                seen.add(user.name)
                todo.append(user)
            if not _passes(here, user, maker, reduced):
                return False
    if (
        several
        and maker.opcode not in ELEMENTWISE
        and any(one.name in seen for one in fused.results if one is not result)
    ):
        return False
    return arrived


def _first_reduction(fused: Computation) -> Instruction | None:
    makers = map(fused.behind_bitcasts, fused.results)
    return next((maker for maker in makers if maker.opcode == "reduce"), None)


def _passes(here: Instruction, user: Instruction, maker: Instruction, reduced: Instruction | None) -> bool:
    """May the result be written while `user` reads `here`: does each place read only the element that it writes?"""
    once = user.operands.count(here.name) == 1
    if user is maker and user.opcode == "scatter" and once and user.operands[0] == here.name:
        return True
    if (
        maker.opcode == "dynamic-update-slice"
        and user.opcode == "dynamic-slice"
        and user.operands[0] == maker.operands[0]
    ):
        return user.operands[1:] == maker.operands[2:]
    if user.opcode in ELEMENTWISE or user.opcode in ("bitcast", "tuple") or user is reduced:
        return True
    if user.opcode != "dynamic-update-slice":
        return False
    return (user.operands[0] == here.name and once) or (user is maker and user.operands.index(here.name) == 1)
