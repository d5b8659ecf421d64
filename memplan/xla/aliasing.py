"""Which operands a kernel's result may overwrite at their last read; by backend.

Sources: `FusionCanShareBufferHint` and `CanShareBufferHint` of XLA:GPU, and for everything else
`CanShareOperandBufferWithUser` of `HloDataflowAnalysis`.
"""

from collections.abc import Iterator, Mapping, Sequence

from memplan.hardware.backend import Backend
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape

ELEMENTWISE = frozenset(
    """
    abs add and atan2 bitcast-convert cbrt ceil clamp count-leading-zeros compare complex convert
    cosine divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one
    logistic maximum minimum multiply negate not or popcnt power real reduce-precision remainder
    round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sqrt subtract tan tanh xor
    """.split()  # noqa: SIM905
)
"""Elementwise opcodes, as HLO prints them; rewrites count them as cheap (`rewrites.fusion`)."""
_BY_NCCL = frozenset({"all-reduce", "collective-broadcast"})  # NCCL can do these in place.
IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})


def updated(module: Module, op: Instruction) -> Iterator[tuple[int, str]]:
    """(leaf, operand) pairs that a kernel updates in place: both are one buffer."""
    if op.opcode == "fusion":
        fused = module[op.called[0]]
        for leaf in range(len(op.result)):
            source = _updated_in(fused, leaf)
            if source is not None and source.opcode == "parameter":
                yield leaf, op.operands[source.parameter_number]
        return
    for leaf, position in _in_place(op).items():
        yield leaf, op.operands[position]


def _in_place(op: Instruction) -> dict[int, int]:
    """Leaf -> position of the operand that it updates."""
    if op.opcode in IN_PLACE:
        return {0: 0}
    return {leaf[0] if leaf else 0: position for leaf, position in op.aliased_outputs}


def _updated_in(fused: Computation, leaf: int) -> Instruction | None:
    """The operand behind bitcasts that a leaf of a fusion updates; None if it updates none."""
    producer = fused.root
    if producer.opcode == "tuple":
        producer = fused.behind_bitcasts(fused.by_leaf[leaf])
        leaf = 0
        if producer.opcode == "get-tuple-element":
            leaf = producer.index
            producer = fused.ops[producer.operands[0]]
    else:
        producer = fused.behind_bitcasts(producer)
    position = _in_place(producer).get(leaf)
    if position is None:
        return None
    return fused.behind_bitcasts(fused.ops[producer.operands[position]])


def overwritable(
    module: Module, op: Instruction, ops: Mapping[str, Instruction], backend: Backend
) -> Iterator[tuple[int, str]]:
    """(leaf, operand) pairs: this leaf of a kernel's result may overwrite the operand.

    The operand is an instruction with one leaf.

    Args:
      ops: the instructions of its computation.
    """
    if backend.fusions_overwrite_operands and op.opcode == "fusion":
        for leaf, number in _overwritable_parameters(module[op.called[0]], op.kind):
            name = op.operands[number]
            is_first_read = op.operands.index(name) == number
            if is_first_read and _has_size_of(ops[name].shape, op.result[leaf]):
                yield leaf, name
        return
    for leaf in range(len(op.result)):
        for name in dict.fromkeys(op.operands):
            if _may_overwrite(module, op, leaf, ops[name], backend):
                yield leaf, name


def _has_size_of(shape: Shape, result: Array) -> bool:
    """Is it one array, with as many elements and as wide ones as the result?"""
    if not isinstance(shape, Array):
        return False
    return (shape.size, shape.bits) == (result.size, result.bits)


def _may_overwrite(
    module: Module,
    op: Instruction,
    leaf: int,
    operand: Instruction,
    backend: Backend,
) -> bool:
    # A library that adds to an operand declares an alias, which is an update.
    if op.opcode in ("copy", "custom-call"):
        return False
    if operand.shape != op.result[leaf]:
        return False
    if op.opcode in _BY_NCCL:
        is_its_own = len(op.operands) == 1 or op.operands[leaf] == operand.name
        return backend.collectives_overwrite_operands and is_its_own
    if op.opcode == "fusion":
        return op.kind == "kLoop" and _is_elementwise(module[op.called[0]], op, operand.name)
    return op.opcode in ELEMENTWISE and op.operands.count(operand.name) == 1


def _is_elementwise(fused: Computation, op: Instruction, operand: str) -> bool:
    """Is everything that a fusion computes from the operand computed elementwise? (XLA:CPU)"""
    queue = [fused.parameters[op.operands.index(operand)]]
    while queue:
        for user, _ in fused.uses[queue.pop().name]:
            if user.opcode not in ELEMENTWISE and user.opcode != "tuple":
                return False
            queue.append(user)
    return True


def _overwritable_parameters(fused: Computation, kind: str) -> Sequence[tuple[int, int]]:
    """(leaf, number of a parameter) pairs: this leaf may overwrite the parameter. (XLA:GPU)

    It may if every path from the parameter to it is elementwise.

    Args:
      kind: of the fusion.
    """
    if kind not in fused.alias_cache:
        reduction = _first_reduction(fused) if kind == "kInput" else None
        is_tuple = fused.root.opcode == "tuple"
        results = list(enumerate(fused.by_leaf)) if is_tuple else [(0, fused.root)]
        pairs = list[tuple[int, int]]()
        for number, parameter in fused.parameters.items():
            dependents = _dependents(fused, parameter, reduction)
            for leaf, result in results:
                if result.name not in dependents:
                    continue
                if _may_overwrite_parameter(fused, dependents, result, reduction):
                    pairs.append((leaf, number))
        fused.alias_cache[kind] = sorted(pairs)
    return fused.alias_cache[kind]


def _dependents(
    fused: Computation,
    parameter: Instruction,
    reduction: Instruction | None,
) -> Mapping[str, Instruction]:
    """The parameter and what is computed from it, without what is computed from the reduction."""
    dependents = {parameter.name: parameter}
    queue = [parameter]
    while queue:
        op = queue.pop()
        for user, _ in fused.uses[op.name] if op is not reduction else ():
            if user.name not in dependents:
                dependents[user.name] = user
                queue.append(user)
    return dependents


def _may_overwrite_parameter(
    fused: Computation,
    dependents: Mapping[str, Instruction],
    result: Instruction,
    reduction: Instruction | None,
) -> bool:
    """May the result overwrite the parameter that has these dependents?"""
    producer = fused.ops[result.operands[0]] if result.opcode == "bitcast" else result
    has_sibling = any(op.name in dependents for op in fused.results if op is not result)
    if producer.opcode not in ELEMENTWISE and has_sibling:
        return False
    return all(
        _may_read(user, operand, producer, reduction)
        for operand in dependents.values()
        if operand is not reduction
        for user, _ in fused.uses[operand.name]
    )


def _first_reduction(fused: Computation) -> Instruction | None:
    producers = map(fused.behind_bitcasts, fused.results)
    return next((producer for producer in producers if producer.opcode == "reduce"), None)


def _may_read(
    user: Instruction,
    operand: Instruction,
    producer: Instruction,
    reduction: Instruction | None,
) -> bool:
    """May `user` read the operand while the producer's result overwrites the fusion's parameter?

    It may if each thread reads only the element that it writes.
    """
    is_read_once = user.operands.count(operand.name) == 1
    is_first = user.operands[0] == operand.name
    if user is producer and user.opcode == "scatter" and is_read_once and is_first:
        return True
    reads_slice = producer.opcode == "dynamic-update-slice" and user.opcode == "dynamic-slice"
    if reads_slice and user.operands[0] == producer.operands[0]:
        return user.operands[1:] == producer.operands[2:]
    if user.opcode in ELEMENTWISE or user.opcode in ("bitcast", "tuple") or user is reduction:
        return True
    if user.opcode != "dynamic-update-slice":
        return False
    is_update = user.operands.index(operand.name) == 1
    return (is_first and is_read_once) or (user is producer and is_update)
