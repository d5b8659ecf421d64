"""A scheduled module -> one in which the fusions that crowd the device are split.

A fusion's operands and results are live at the same time, and no plan goes below their bytes. If
they nearly fill the budget, the fusion is split into several that run one after another: the first
ones compute some of the results, or a value inside of it, usually a mask of one byte per element,
that the next ones read. Operands of one piece are not live during the other. ResNet-50 at batch
1152 on a V100: five fusions in two pieces each; the floor falls from 13.8 to 11.2 GiB, and the step
takes 0.7 % longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.xla.aliasing import ELEMENTWISE
from memplan.xla.edit import Edit
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.rewrites.fusion import (
    CHEAP,
    BodyChanges,
    backward_slice,
    buffer_of,
    has_tuple_readers,
    keeps_bits,
    new_fusion,
    with_root,
)
from memplan.xla.shapes import Shape

WHOLE_SHARE = 0.9
"""A fusion above this share of the budget is split: ResNet-50 in 1250 MiB has one kernel above it,
whose pieces spare the smallest plan 23 MiB; with 0.7 ResNet-50 at 30 % and the 3D U-Net at 40 %
take as long. It is not `merge.MERGED_SHARE`: what XLA made one fusion is split for room alone, at
the price of reading twice; what it left apart is merged for time, as long as there is room."""


def split_fusions(module: Module, problem: Problem, budget_nbytes: int) -> Module:
    """The module with those fusions in pieces; itself where there are none.

    Nothing is split finer than the largest kernel that stays whole, so that a budget of 0 is the
    lowest one.

    Args:
      problem: the module's, by `problem_of`.
      budget_nbytes: what temporaries may take.
    """
    bodies: dict[str, Computation] = {}
    for body in with_blocks(module, module.entry):
        bodies.update(dict.fromkeys(body.ops, body))
    fusions, limit = _large_fusions(module, problem, bodies, int(WHOLE_SHARE * budget_nbytes))
    edit = Edit(module)
    changes: dict[str, BodyChanges] = {}  # by computation
    for fusion in fusions:
        pieces = fusion.pieces(limit)
        if len(pieces) > 1:
            body = bodies[fusion.op.name]
            _split(fusion, pieces, body, edit, changes.setdefault(body.name, BodyChanges()))
    for name, body_changes in changes.items():
        body_changes.apply(edit, module[name])
    return edit.module


def _large_fusions(
    module: Module, problem: Problem, bodies: Mapping[str, Computation], limit: int
) -> tuple[list[_SplittableFusion], int]:
    """Fusions that can be split and take more bytes than the limit, and the limit of a piece.

    Args:
      bodies: instruction -> its computation.
      limit: rises to the bytes of the largest kernel that cannot be split, and of the smallest
        pieces.
    """
    fusions: list[_SplittableFusion] = []
    kernel_nbytes = functools.partial(_nbytes, problem)
    for kernel in sorted(problem.kernels, key=kernel_nbytes, reverse=True):
        nbytes = kernel_nbytes(kernel)
        if nbytes <= limit:
            break
        body = bodies.get(kernel.name)
        fusion = None if body is None else _splittable(module, body, kernel, problem)
        if fusion is not None:
            fusions.append(fusion)
            nbytes = fusion.least_nbytes
        limit = max(limit, nbytes)
    return fusions, limit


@dataclass(frozen=True)
class _FusionPiece:
    """A part of a fusion, which becomes a fusion of its own."""

    results: tuple[str, ...]  # instructions of the whole fusion's computation that it returns
    inputs: frozenset[str]  # instructions that pieces before it return, and that it reads


@dataclass(frozen=True)
class _SplittableFusion:
    """A fusion that may be split."""

    op: Instruction
    fused: Computation
    results: tuple[str, ...]  # results that are read
    # parameter -> the buffer that it is, and the buffer's bytes if it is a temporary
    sources: Mapping[str, tuple[str, int]]

    def pieces(self, limit: int) -> list[_FusionPiece]:
        """The fewest pieces of at most this size each, in order; else the smallest pieces."""
        return list(self._split(_FusionPiece(self.results, frozenset()), limit))

    @functools.cached_property
    def least_nbytes(self) -> int:
        return max(map(self._nbytes, self.pieces(0)))

    def producers(self, piece: _FusionPiece) -> list[Instruction]:
        """The instructions of a piece, in order, with parameters and inputs."""
        return backward_slice(self.fused.ops, piece.results, piece.inputs)

    def _names(self, piece: _FusionPiece) -> set[str]:
        return {op.name for op in self.producers(piece)}

    def _nbytes(self, piece: _FusionPiece) -> int:
        """Bytes that are live while a piece runs: what it reads and writes."""
        names = self._names(piece)
        operands = {self.sources[name] for name in names if name in self.sources}
        values = [self.fused.ops[name] for name in (*piece.results, *(piece.inputs & names))]
        return sum(nbytes for _, nbytes in operands) + sum(value.nbytes for value in values)

    def _split(self, piece: _FusionPiece, limit: int) -> Iterator[_FusionPiece]:
        nbytes = self._nbytes(piece)
        if nbytes <= limit:
            yield piece
            return
        pair = min(self._pairs(piece), key=self._pair_nbytes, default=None)
        if pair is None or self._pair_nbytes(pair)[0] >= nbytes:
            yield piece
            return
        for part in pair:
            yield from self._split(part, limit)

    def _pair_nbytes(self, pair: tuple[_FusionPiece, _FusionPiece]) -> tuple[int, int]:
        """Bytes of the larger piece, and of both."""
        first, second = map(self._nbytes, pair)
        return max(first, second), first + second

    def _pairs(self, piece: _FusionPiece) -> Iterator[tuple[_FusionPiece, _FusionPiece]]:
        """Pairs of pieces that do the same; what both do is cheap."""
        for op in self.producers(piece):
            other_results = tuple(name for name in piece.results if name != op.name)
            first = _FusionPiece((op.name,), piece.inputs)
            if op.name in piece.inputs or op.opcode == "parameter" or not other_results:
                continue
            seconds: list[_FusionPiece] = []
            if op.name in piece.results:
                seconds.append(_FusionPiece(other_results, piece.inputs))
            if self._may_end_in(op):
                seconds.append(_FusionPiece(other_results, piece.inputs | {op.name}))
            for second in seconds:
                repeated = self._names(first) & self._names(second) - {op.name} - piece.inputs
                if all(self.fused.ops[name].opcode in CHEAP for name in repeated):
                    yield first, second

    def _may_end_in(self, op: Instruction) -> bool:
        return op.opcode in ELEMENTWISE and keeps_bits(self.fused, op)


def _splittable(
    module: Module,
    body: Computation,
    kernel: Kernel,
    problem: Problem,
) -> _SplittableFusion | None:
    """A kernel that may be split: its results lie over nothing that it reads by necessity."""
    op = body.ops[kernel.name]
    if op.opcode != "fusion" or op.kind != "kLoop" or op.root or has_tuple_readers(body, op):
        return None
    fused = module[op.called[0]]
    leaves = [0]
    if isinstance(op.shape, tuple):
        leaves = [element.index for element, _ in body.uses[op.name]]
    if not _has_separate_results(problem, kernel) or len(fused.results) != len(op.result):
        return None
    nbytes = dict.fromkeys((buffer.name for buffer in problem.buffers), 0)
    nbytes.update((buffer.name, buffer.nbytes) for buffer in _temporaries(problem.buffers))
    buffers = [buffer_of(body, operand) for operand in op.operands]
    sources = {
        parameter.name: (buffers[number], nbytes.get(buffers[number], parameter.nbytes))
        for number, parameter in fused.parameters.items()
    }
    results = tuple(dict.fromkeys(fused.results[leaf].name for leaf in leaves))
    if not results or not sources.keys().isdisjoint(results):
        return None
    return _SplittableFusion(op, fused, results, sources)


def _has_separate_results(problem: Problem, kernel: Kernel) -> bool:
    """Are all results of a kernel temporaries that share no place with another buffer?"""
    results = [problem.buffers[number] for number in kernel.writes]
    if any(len(problem.alias_sets[buffer.alias_set]) > 1 for buffer in results):
        return False
    return len(_temporaries(results)) == len(results)


def _nbytes(problem: Problem, kernel: Kernel) -> int:
    buffers = [problem.buffers[number] for number in {*kernel.reads, *kernel.writes}]
    return sum(buffer.nbytes for buffer in _temporaries(buffers))


def _temporaries(buffers: Iterable[Buffer]) -> list[Buffer]:
    return [buffer for buffer in buffers if buffer.role is Role.TEMPORARY]


def _split(
    fusion: _SplittableFusion,
    pieces: Sequence[_FusionPiece],
    body: Computation,
    edit: Edit,
    changes: BodyChanges,
) -> None:
    """Replace a fusion by its pieces; the last has the name of the whole, all others one result."""
    op = fusion.op
    last = pieces[-1]
    kernels: dict[str, str] = {}  # result -> the piece that returns it
    parts: list[Instruction] = []
    for piece in pieces:
        name = op.name if piece is last else edit.fresh(op.name, "part")
        part, fused = _part(fusion, piece, name, kernels, edit)
        parts.append(part)
        changes.callees.append(fused)
        kernels.update((result, name) for result in piece.results)
    changes.replaced[op.name] = parts
    elements = body.uses[op.name] if isinstance(op.shape, tuple) else ()
    for element, _ in elements:
        result = fusion.fused.results[element.index].name
        if result in last.results and len(last.results) > 1:
            index = last.results.index(result)
            changes.replaced[element.name] = [element.changed(index=index)]
        else:
            changes.replaced[element.name] = []
            changes.renamed[element.name] = kernels[result]


def _part(
    fusion: _SplittableFusion,
    piece: _FusionPiece,
    name: str,
    kernels: Mapping[str, str],
    edit: Edit,
) -> tuple[Instruction, Computation]:
    """The fusion that a piece becomes, and its computation.

    Args:
      kernels: instruction -> the earlier piece that returns it.
    """
    ops: list[Instruction] = []
    parameters: list[tuple[str, Shape]] = []
    operands: list[str] = []
    for op in fusion.producers(piece):
        if op.name in piece.inputs:
            operands.append(kernels[op.name])
        elif op.opcode == "parameter":
            operands.append(fusion.op.operands[op.parameter_number])
        else:
            ops.append(op)
            continue
        parameters.append((op.name, op.shape))
    results = [fusion.fused.ops[result] for result in piece.results]
    ops = with_root(ops, results, edit.fresh(fusion.fused.root.name, "part"))
    called = edit.fresh(fusion.fused.name, "part")
    return new_fusion(fusion.op, name, called, operands, parameters, ops)
