"""When does a value keep its last bits in another fusion?

A compiler may take a product into the sum that reads it, unrounded (`FPOpFusion::Fast`); of two products in a sum it
takes one, and one that others read as well perhaps not (`visitFADDForFMACombine`). A sum over many elements adds them
in an order that follows from what it is over, from the narrowest array of its fusion, and from whether something in
there keeps it from reading several elements at once (`ReductionFusion`, `MayPreventVectorization`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from memplan.xla.module import Computation, Instruction, leaves

SUMS = frozenset({"add", "subtract"})
_PASSING = ("negate", "broadcast")  # a product: a sum can take it in through these
_SIGNED = ("bitcast", "negate")  # of a product: a sum can take it in all the same
_ONE_BY_ONE = frozenset({"sine", "cosine", "tan", "power", "atan2"})


def is_product(fused: Computation, op: Instruction) -> bool:
    """Could a sum take it in unrounded?"""
    while op.opcode in _SIGNED:
        op = fused.ops[op.operands[0]]
    return op.opcode == "multiply"


def narrowest(op: Instruction, operands: Iterable[Instruction]) -> tuple[int, int]:
    """Bits of an element of the narrowest array that a fusion reads, and that it makes."""
    read = (array.bits for one in operands for array in one.result)
    return min(read, default=0), min(array.bits for array in op.result)


def one_by_one(fused: Computation) -> bool:
    """Does it keep sums beside it from reading several elements at once?"""
    return not _ONE_BY_ONE.isdisjoint(op.opcode for op in fused.ops.values())


def sums_alike(
    parts: Sequence[Sequence[Instruction]], names: Mapping[str, object], returned: Collection[str] = ()
) -> bool:
    """Does every sum take in the same products when several lists of instructions are one, and what is twice is once?

    Args:
      names: of operands that no instruction makes: what is the same for whoever reads them.
      returned: names of instructions whose values are written.
    """
    keys, readers = dict[str, object](names), defaultdict[object, dict[int, set[object]]](lambda: defaultdict(set))
    products, added = set[object](), defaultdict[object, set[int]](set)
    for number, ops in enumerate(parts):
        for op in ops:
            given = tuple(keys[name] for name in op.operands)
            if op.name in returned:
                readers[given[0] if op.opcode == "bitcast" else _key(op, given)][number].add("returned")
            if op.opcode == "bitcast":
                keys[op.name] = given[0]
                continue
            keys[op.name] = key = _key(op, given)
            if op.opcode == "multiply" or (op.opcode in _PASSING and given[0] in products):
                products.add(key)
            for one in given:
                readers[one][number].add(key)
                if op.opcode in SUMS or op.opcode == "reduce" or op.opcode in _PASSING:
                    added[one].add(number)
    return all(
        set().union(*readers[product].values()) == readers[product][number]
        for product in products & added.keys()
        for number in added[product]
    )


def _key(op: Instruction, given: tuple[object, ...]) -> object:
    """The same for what computes the same."""
    said = op.attributes.partition("metadata=")[0].rstrip(", ")
    if op.opcode in ("add", "multiply"):
        given = tuple(sorted(given, key=hash))
    return hash((op.opcode, tuple(array.dtype for array in leaves(op.shape)), said, given))
