"""A scheduled module -> one in which large fills are computed right before their first read.

A loop begins with zeros for its stacks. XLA of jax 0.11 fills the stacks of several loops in one fusion, so all are
live from the first loop on: the 3D U-Net at 256^3, in slabs for 6 GiB on an H100, takes 15 GiB.

In the body of a loop, XLA fills once what several inner loops begin with, and copies it for each: a copy of a fill is
another fill.
"""

from collections.abc import Collection, Iterator

from memplan.xla.module import Computation, Instruction, Module, Names, predecessors, with_blocks
from memplan.xla.rewrites.fusion import (
    LEAST_BYTES,
    has_tuple_readers,
    insert,
    is_open,
    rename_operands,
    renumber,
    slice_fusion,
)

# Of a module's temporaries: an array above this share counts as large. A U-Net at 32^3 in slabs, on a V100 with jax
# 0.11, takes 8.0 MiB without this rewrite, 6.0 with it; few of its arrays have a mebibyte.
_SHARE = 0.01


def fill_late(module: Module, temporary_nbytes: int) -> Module:
    """The module with every such array in a separate fusion; itself if there is none.

    Args:
      temporary_nbytes: of the module's temporaries.
    """
    least_nbytes = min(LEAST_BYTES, int(_SHARE * temporary_nbytes))
    names, texts = Names(module), module.texts
    for body in with_blocks(module, module.entry):
        ordered = {name for op in body.ops.values() if (found := predecessors(op)) for name in (op.name, *found)}
        fills = [op for op in body.ops.values() if _is_fill(body, op, least_nbytes, ordered)]
        if fills:
            rewriter = _BodyRewriter(module, body, names, least_nbytes)
            for fill in fills:
                rewriter.take(fill)
            texts = insert(texts, body.name, body.text_with(rewriter.lines()), rewriter.bodies)
    return module.with_texts(texts)


def _is_fill(body: Computation, op: Instruction, least_nbytes: int, ordered: Collection[str]) -> bool:
    """Is it a fusion with no operands and a large result?

    Args:
      ordered: instructions with control edges, which fix their order.
    """
    if not is_open(op) or op.operands or op.root or has_tuple_readers(body, op):
        return False
    names = (op.name, *(user.name for user, _ in body.uses[op.name]))
    return any(array.nbytes >= least_nbytes for array in op.result) and not any(name in ordered for name in names)


class _BodyRewriter:
    """One computation.

    Attributes:
      bodies: what the new fusions call.
    """

    def __init__(self, module: Module, body: Computation, names: Names, least_nbytes: int) -> None:
        self._module, self._body, self._names, self._least_nbytes = module, body, names, least_nbytes
        self._late: dict[str, Instruction] = {}  # not written yet
        self._alone: dict[str, str] = {}  # elements of tuples, and fusions that make one alone
        self._now: dict[str, str] = {}  # new lines for instructions that keep their position
        self._taken = set[str]()
        self.bodies: dict[str, str] = {}

    def take(self, op: Instruction) -> None:
        """Give every large result that is read a separate fusion; the others stay together, at their position."""
        self._taken.add(op.name)
        if not isinstance(op.shape, tuple):
            self._late[op.name] = op
            for copy in (user for user, _ in self._body.uses[op.name] if user.opcode == "copy" and not user.root):
                if str(copy.shape) == str(op.shape):
                    self._taken.add(copy.name)
                    self._late[copy.name] = self._slice(op, [0], copy.name)
            return
        elements: dict[int, list[Instruction]] = {}
        for user, _ in self._body.uses[op.name]:
            elements.setdefault(user.index, []).append(user)
        small = [leaf for leaf in elements if op.result[leaf].nbytes < self._least_nbytes]
        for leaf in sorted(elements.keys() - small):
            fusion = self._slice(op, [leaf], self._names.fresh(op.name, "part"))
            self._late[fusion.name] = fusion
            self._alone.update((element.name, fusion.name) for element in elements[leaf])
        if small:
            self._now[op.name] = self._slice(op, small, op.name).line
            for number, leaf in enumerate(small):
                for element in elements[leaf]:
                    if len(small) == 1:
                        self._alone[element.name] = op.name
                    else:
                        self._now[element.name] = renumber(element, number)

    def _slice(self, op: Instruction, leaves: list[int], name: str) -> Instruction:
        fused = self._module[op.called[0]]
        called = self._names.fresh(fused.name, "part")
        fusion, self.bodies[called] = slice_fusion(op, fused, leaves, name, called, self._names)
        return fusion

    def lines(self) -> Iterator[str]:
        for op in self._body.ops.values():
            if op.name in self._now:
                yield self._now[op.name]
            elif op.opcode == "bitcast" and not op.root and self._made_late(op.operands[0]):
                self._late[op.name] = op
            elif op.name not in self._taken and op.name not in self._alone:
                yield from self._written(op)

    def _made_late(self, name: str) -> bool:
        return self._alone.get(name, name) in self._late

    def _written(self, op: Instruction) -> Iterator[str]:
        """An instruction, after its operands that are not written yet."""
        for name in op.operands:
            if late := self._late.pop(self._alone.get(name, name), None):
                yield from self._written(late)
        yield rename_operands(op, self._alone)
