"""Fusions and the computations that they call: queries, and how to rewrite them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.xla.aliasing import ELEMENTWISE
from memplan.xla.edit import Edit, fused_computation, tuple_of
from memplan.xla.module import Computation, Instruction
from memplan.xla.shapes import Array, Shape

CHEAP = ELEMENTWISE | {"broadcast", "bitcast", "constant", "iota", "parameter"}
"""Opcodes that cost little beside the bytes that a fusion moves, and may be repeated."""
NAMING = frozenset({"bitcast", "get-tuple-element"})
"""Opcodes of aliases: their results name another instruction's buffer."""
# Opcodes that pass a value on to readers that `readers_of` does not follow.
_UNKNOWN_READERS = frozenset({"tuple", "opt-barrier", "add-dependency", "after-all"})
LEAST_BYTES = 1 << 20
"""Fusions are rewritten for values of at least so many bytes: a fast GPU reads them in a fifth of a
launch's time.
"""


def is_open(op: Instruction) -> bool:
    """A fusion whose emitter accepts any instruction."""
    return op.opcode == "fusion" and op.kind in ("kLoop", "kInput")


def buffer_of(body: Computation, name: str) -> str:
    """The buffer behind bitcasts, as a problem names it."""
    op = body.behind_bitcasts(body.ops[name])
    return f"{op.operands[0]}{{{op.index}}}" if op.opcode == "get-tuple-element" else op.name


def result_buffers(op: Instruction) -> tuple[str, ...]:
    """Buffers of its results, as a problem names them."""
    if not isinstance(op.shape, tuple):
        return (op.name,)
    return tuple(f"{op.name}{{{leaf}}}" for leaf in range(len(op.shape)))


def operand_nbytes(body: Computation, op: Instruction) -> dict[str, int]:
    """Buffers that it reads, and their bytes."""
    producers = [body.behind_bitcasts(body.ops[operand]) for operand in op.operands]
    return {buffer_of(body, producer.name): producer.nbytes for producer in producers}


def has_tuple_readers(body: Computation, op: Instruction) -> bool:
    """Is its tuple read as a whole?"""
    readers = (reader for reader, _ in body.uses[op.name])
    return isinstance(op.shape, tuple) and any(op.opcode != "get-tuple-element" for op in readers)


def readers_of(body: Computation, producer: Instruction, buffer: str) -> set[str] | None:
    """Kernels that read a result's buffer; None if the root reads it, or what is no kernel."""
    if has_tuple_readers(body, producer):
        return None
    kernels = set[str]()
    users = [user for user, _ in body.uses[producer.name]]
    if buffer != producer.name:
        users = [user for user in users if buffer_of(body, user.name) == buffer]
    while users:
        user = users.pop()
        if user.root or user.opcode in _UNKNOWN_READERS:
            return None
        if user.opcode in NAMING:
            users += [reader for reader, _ in body.uses[user.name]]
        else:
            kernels.add(user.name)
    return kernels


def backward_slice(
    ops: Mapping[str, Instruction], results: Iterable[str], available: Collection[str] = ()
) -> list[Instruction]:
    """The producers of some values of a computation, in order, up to the available values."""
    needed = set(results)
    for op in reversed(list(ops.values())):
        if op.name in needed and op.name not in available:
            needed.update(op.operands)
    return [op for op in ops.values() if op.name in needed]


def with_root(
    ops: Sequence[Instruction],
    results: Sequence[Instruction],
    name: str,
) -> list[Instruction]:
    """The instructions with a root: the one result, or a tuple of several, with this name."""
    if len(results) == 1:
        root = results[0].changed(root=True)
        return [*(op for op in ops if op.name != root.name), root]
    shapes = [result.shape for result in results]
    return [*ops, tuple_of(name, shapes, [result.name for result in results], root=True)]


def without_unread_aliases(ops: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of a computation without aliases that none of them reads."""
    read: set[str] = set()
    kept: list[Instruction] = []
    for op in reversed(ops):
        if op.opcode not in NAMING or op.root or op.name in read:
            read.update(op.operands)
            kept.append(op)
    return kept[::-1]


@dataclass
class BodyChanges:
    """Changes of one computation, made at once."""

    # instruction -> those that take its position; () removes it
    replaced: dict[str, Sequence[Instruction]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # operand -> the one to read instead
    callees: list[Computation] = field(default_factory=list)  # new computations

    def ops(self, body: Computation, order: Iterable[str] | None = None) -> list[Instruction]:
        """The changed instructions of a computation, in its order or another."""
        return [
            op.with_operands(self.renamed)
            for name in (body.ops if order is None else order)
            for op in self.replaced.get(name, [body.ops[name]])
        ]

    def apply(self, edit: Edit, body: Computation) -> None:
        edit.replace(body.with_ops(self.ops(body)), self.callees)


def new_fusion(
    op: Instruction,
    name: str,
    called: str,
    operands: Sequence[str],
    parameters: Sequence[tuple[str, Shape]],
    ops: Sequence[Instruction],
) -> tuple[Instruction, Computation]:
    """A fusion of another one's kind, and its computation.

    Args:
      op: the other fusion.
      name, called: of the new fusion, and of its computation.
      ops: instructions of the computation without parameters; one is the root.
    """
    fused = fused_computation(called, parameters, ops)
    shape = fused.root.shape
    fusion = op.changed(name=name, operands=operands, shape=shape, called={op.called[0]: called})
    return fusion, fused


def slice_fusion(
    op: Instruction, fused: Computation, leaves: Sequence[int], name: str, called: str, edit: Edit
) -> tuple[Instruction, Computation]:
    """A fusion that computes only these results of another one, and its computation."""
    results = [fused.results[leaf] for leaf in leaves]
    producers = backward_slice(fused.ops, (result.name for result in results))
    inner = [producer for producer in producers if producer.opcode != "parameter"]
    ops = with_root(
        [producer for producer in inner if not producer.root],
        results,
        edit.fresh(fused.root.name, "in"),
    )
    read = {operand for inner_op in ops for operand in inner_op.operands} | {ops[-1].name}
    operands: list[str] = []
    parameters: list[tuple[str, Shape]] = []
    for number, operand in enumerate(op.operands):
        parameter = fused.parameters[number]
        if parameter.name in read:
            operands.append(operand)
            parameters.append((parameter.name, parameter.shape))
    return new_fusion(op, name, called, operands, parameters, ops)


# Opcodes that XLA's emitter of reductions computes element by element.
_NOT_VECTORIZED = frozenset({"sine", "cosine", "tan", "power", "atan2"})


def keeps_bits(fused: Computation, result: Instruction) -> bool:
    """Does a value have the same bits inside of a fusion as after it is written and read again?

    XLA:GPU rounds every product, sum and conversion inside of a fusion as between two: its PTX says
    `mul.rn` and `add.rn`, which are never contracted, and rounds to float16 and back. One pair
    becomes one operation: an integer converted to a float and then to a narrower one (MLIR's
    `TruncFSIToFPToSIToFP`).
    """
    producer = fused.behind_bitcasts(result)
    if producer.opcode != "convert":
        return True
    source = fused.ops[producer.operands[0]].shape
    return not (isinstance(source, Array) and source.numpy_name.startswith(("int", "uint")))


def narrowest_bits(op: Instruction, operands: Iterable[Instruction]) -> tuple[int, int]:
    """Bits of an element of the narrowest array that a fusion reads, and that it writes.

    A sum over many elements adds them in an order that follows from its shape, from this width, and
    from whether something in the fusion `prevents_vectorization` (XLA's `ReductionFusion`,
    `MayPreventVectorization`).
    """
    read = (array.bits for operand in operands for array in operand.result)
    return min(read, default=0), min(array.bits for array in op.result)


def prevents_vectorization(fused: Computation) -> bool:
    """Does it prevent the sums of its fusion from reading several elements at once?"""
    return not _NOT_VECTORIZED.isdisjoint(op.opcode for op in fused.ops.values())
