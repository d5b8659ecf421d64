"""A scheduled module -> one in which large fills are computed right before their first read.

A loop begins with zeros for its stacks. XLA of jax 0.11 fills the stacks of several loops in one
fusion, so all are live from the first loop on: the 3D U-Net at 256^3, in slabs for 6 GiB on an
H100, takes 15 GiB.

In the body of a loop, XLA fills once what several inner loops begin with, and copies it for each: a
copy of a fill is another fill.
"""

from collections.abc import Collection, Iterator, Sequence

from memplan.xla.edit import Edit
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.rewrites.fusion import LEAST_BYTES, has_tuple_readers, is_open, slice_fusion

# An array above this share of a module's temporaries counts as large. A U-Net at 32^3 in slabs, on
# a V100 with jax 0.11, takes 8.0 MiB without this rewrite, 6.0 with it; few of its arrays have a
# mebibyte.
_SHARE = 0.01


def fill_late(module: Module, temporary_nbytes: int) -> Module:
    """The module with every such array in a separate fusion; itself if there is none.

    Args:
      temporary_nbytes: of the module's temporaries.
    """
    least_nbytes = min(LEAST_BYTES, int(_SHARE * temporary_nbytes))
    edit = Edit(module)
    for body in with_blocks(module, module.entry):
        ordered = _with_control_edges(body)
        fills = [op for op in body.ops.values() if _is_fill(body, op, least_nbytes, ordered)]
        if fills:
            late_fills = _LateFills(module, body, edit, least_nbytes)
            for fill in fills:
                late_fills.add(fill)
            edit.replace(body.with_ops(late_fills.ops()), late_fills.callees)
    return edit.module


def _with_control_edges(body: Computation) -> set[str]:
    """Instructions with control edges, which fix their order."""
    ordered = [op for op in body.ops.values() if op.predecessors]
    return {name for op in ordered for name in (op.name, *op.predecessors)}


def _is_fill(
    body: Computation,
    op: Instruction,
    least_nbytes: int,
    ordered: Collection[str],
) -> bool:
    """Is it a fusion with no operands and a large result?

    Args:
      ordered: instructions with control edges.
    """
    if not is_open(op) or op.operands or op.root or has_tuple_readers(body, op):
        return False
    names = (op.name, *(user.name for user, _ in body.uses[op.name]))
    is_large = any(array.nbytes >= least_nbytes for array in op.result)
    return is_large and not any(name in ordered for name in names)


class _LateFills:
    """The large fills of one computation, which run right before their first reader.

    Attributes:
      callees: the computations that the new fusions call.
    """

    def __init__(self, module: Module, body: Computation, edit: Edit, least_nbytes: int) -> None:
        self._module = module
        self._body = body
        self._edit = edit
        self._least_nbytes = least_nbytes
        self._pending: dict[str, Instruction] = {}  # fills, and views of them, that do not run yet
        self._fills: dict[str, str] = {}  # element of a tuple -> the fusion that makes it alone
        self._in_place: dict[str, Instruction] = {}  # changed instructions that keep their position
        self._removed = set[str]()  # instructions that lose their position
        self.callees: list[Computation] = []

    def add(self, op: Instruction) -> None:
        """Give every large result that is read a separate fusion; small results stay in one."""
        self._removed.add(op.name)
        if not isinstance(op.shape, tuple):
            self._add_single(op)
            return
        elements: dict[int, list[Instruction]] = {}
        for element, _ in self._body.uses[op.name]:
            elements.setdefault(element.index, []).append(element)
        small = [leaf for leaf in elements if op.result[leaf].nbytes < self._least_nbytes]
        for leaf in sorted(elements.keys() - small):
            fusion = self._slice(op, [leaf], self._edit.fresh(op.name, "part"))
            self._pending[fusion.name] = fusion
            self._fills.update((element.name, fusion.name) for element in elements[leaf])
        if small:
            self._in_place[op.name] = self._slice(op, small, op.name)
        for index, leaf in enumerate(small):
            for element in elements[leaf]:
                if len(small) == 1:
                    self._fills[element.name] = op.name
                else:
                    self._in_place[element.name] = element.changed(index=index)

    def _add_single(self, op: Instruction) -> None:
        """A fusion of one result, and a fusion for each copy of it."""
        self._pending[op.name] = op
        for copy, _ in self._body.uses[op.name]:
            if copy.opcode == "copy" and not copy.root and copy.shape == op.shape:
                self._removed.add(copy.name)
                self._pending[copy.name] = self._slice(op, [0], copy.name)

    def _slice(self, op: Instruction, leaves: Sequence[int], name: str) -> Instruction:
        fused = self._module[op.called[0]]
        called = self._edit.fresh(fused.name, "part")
        fusion, sliced = slice_fusion(op, fused, leaves, name, called, self._edit)
        self.callees.append(sliced)
        return fusion

    def ops(self) -> Iterator[Instruction]:
        """The computation's instructions, in their new order."""
        for op in self._body.ops.values():
            if op.name in self._in_place:
                yield self._in_place[op.name]
            elif op.opcode == "bitcast" and not op.root and self._is_pending(op.operands[0]):
                self._pending[op.name] = op
            elif op.name not in self._removed and op.name not in self._fills:
                yield from self._with_fills(op)

    def _is_pending(self, name: str) -> bool:
        return self._fills.get(name, name) in self._pending

    def _with_fills(self, op: Instruction) -> Iterator[Instruction]:
        """An instruction, after its operands that are pending."""
        for name in op.operands:
            fill = self._pending.pop(self._fills.get(name, name), None)
            if fill is not None:
                yield from self._with_fills(fill)
        yield op.with_operands(self._fills)
