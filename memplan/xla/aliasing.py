"""Which operands a kernel's result may overwrite at their last read; by backend.

Sources: `FusionCanShareBufferHint` and `CanShareBufferHint` of XLA:GPU; `CanShareOperandBufferWithUser` of
`HloDataflowAnalysis` for XLA:CPU, and for the rest.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

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


def overwritable(
    module: Module, op: Instruction, ops: Mapping[str, Instruction], on_gpu: bool
) -> Iterator[tuple[int, str]]:
    """(leaf, operand) pairs: this leaf of a kernel's result may overwrite the operand, an instruction with one leaf.

    Args:
      ops: the instructions of its computation.
    """
    if on_gpu and op.opcode == "fusion":
        for leaf, number in _fused_over(module[op.called[0]], op.attribute("kind")):
            name = op.operands[number]
            source, result = ops[name].shape, op.result[leaf]
            alike = isinstance(source, Array) and (source.size, source.bits) == (result.size, result.bits)
            if alike and op.operands.index(name) == number:
                yield leaf, name
        return
    for leaf in range(len(op.result)):
        for name in dict.fromkeys(op.operands):
            if _may_overwrite(module, op, leaf, ops[name], on_gpu):
                yield leaf, name


def _may_overwrite(module: Module, op: Instruction, leaf: int, operand: Instruction, on_gpu: bool) -> bool:
    if op.opcode in ("copy", "custom-call"):  # a library that adds to an operand says so: that is an update
        return False
    if operand.shape != op.result[leaf]:
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


def _fused_over(fused: Computation, kind: str) -> Sequence[tuple[int, int]]:
    """(leaf, number of a parameter) pairs: is every path from the parameter to that result elementwise? (XLA:GPU)"""
    if kind not in fused.alias_cache:
        several = fused.root.opcode == "tuple"
        reduced = _first_reduction(fused) if kind == "kInput" else None
        leaves = list(enumerate(fused.by_leaf)) if several else [(0, fused.root)]
        found = list[tuple[int, int]]()
        for number, parameter in fused.parameters.items():
            reached = _reached(fused, parameter, reduced)
            found += [
                (leaf, number)
                for leaf, result in leaves
                if result.name in reached and _is_written_over(fused, reached, result, reduced)
            ]
        fused.alias_cache[kind] = sorted(found)
    return fused.alias_cache[kind]


def _reached(fused: Computation, start: Instruction, reduced: Instruction | None) -> Mapping[str, Instruction]:
    """What is computed from a parameter, up to the reduction whose result is written."""
    found, todo = {start.name: start}, [start]
    while todo:
        here = todo.pop()
        for user, _ in fused.uses[here.name] if here is not reduced else ():
            if user.name not in found:
                found[user.name] = user
                todo.append(user)
    return found


def _is_written_over(
    fused: Computation, reached: Mapping[str, Instruction], result: Instruction, reduced: Instruction | None
) -> bool:
    """May the result be written over the parameter that reaches all these?"""
    maker = fused.ops[result.operands[0]] if result.opcode == "bitcast" else result
    if maker.opcode not in ELEMENTWISE and any(one.name in reached for one in fused.results if one is not result):
        return False
    return all(
        _passes(here, user, maker, reduced)
        for here in reached.values() if here is not reduced
        for user, _ in fused.uses[here.name]
    )  # fmt: skip


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
