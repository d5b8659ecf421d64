"""A scheduled module -> one in which the fusions that crowd the device are split.

A fusion's operands and results are live at the same time, and no plan goes below their bytes. If they nearly fill the
budget, the fusion is split into several that run one after another: the first ones compute some of the results, or a
value inside of it, usually a mask of one byte per element, that the next ones read. Operands of one piece are not live
during the other. ResNet-50 at batch 1152 on a V100: five fusions in two pieces each; the floor falls from 13.8 to
11.2 GiB, and the step takes 0.7 % longer.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.planning.problem import Kernel, Problem, Role
from memplan.xla.aliasing import ELEMENTWISE
from memplan.xla.module import Computation, Instruction, Module, Names, read_instruction, with_blocks
from memplan.xla.rewrites.fusion import (
    CHEAP,
    backward_slice,
    buffer_of,
    has_tuple_readers,
    insert,
    keeps_bits,
    new_fusion,
    rename_operands,
    renumber,
    with_root,
)
from memplan.xla.shapes import Shape

WHOLE_SHARE = 0.9
"""Of the budget, at most, for what stays whole: ResNet-50 in 1250 MiB has one kernel above it, whose pieces spare the
smallest plan 23 MiB; with 0.7 ResNet-50 at 30 % and the 3D U-Net at 40 % take as long. It is not `merge.MERGED_SHARE`:
what XLA made one fusion is split for room alone, at the price of reading twice; what it left apart is merged for time,
as long as there is room."""


def split_fusions(module: Module, problem: Problem, budget_nbytes: int) -> Module:
    """The module with those fusions in pieces; itself where there are none.

    Nothing is split finer than the largest kernel that stays whole, so that a budget of 0 is the lowest one.

    Args:
      problem: the module's, by `problem_of`.
      budget_nbytes: what temporaries may take.
    """
    bodies = {op.name: body for body in with_blocks(module, module.entry) for op in body.ops.values()}
    limit, fusions = int(WHOLE_SHARE * budget_nbytes), list[_Fusion]()
    for kernel in sorted(problem.kernels, key=functools.partial(_nbytes, problem), reverse=True):
        if (nbytes := _nbytes(problem, kernel)) <= limit:
            break
        fusion = _splittable(module, bodies[kernel.name], kernel, problem) if kernel.name in bodies else None
        limit = max(limit, fusion.least_nbytes if fusion else nbytes)
        fusions += [fusion] if fusion else []
    names, rewriters = Names(module), dict[str, _BodyRewriter]()
    for fusion in fusions:
        if len(pieces := fusion.pieces(limit)) > 1:
            body = bodies[fusion.op.name]
            rewriters.setdefault(body.name, _BodyRewriter(body, names)).split(fusion, pieces)
    texts = module.texts
    for rewriter in rewriters.values():
        texts = rewriter.texts(texts)
    return module.with_texts(texts)


@dataclass(frozen=True)
class _Piece:
    """A fusion of its own."""

    makes: tuple[str, ...]  # instructions of the whole fusion's computation that it returns
    given: frozenset[str]  # those that pieces before it return and it reads


@dataclass(frozen=True)
class _Fusion:
    """A fusion that may be split."""

    op: Instruction
    fused: Computation
    makes: tuple[str, ...]  # results that are read
    sources: Mapping[str, tuple[str, int]]  # of every parameter the buffer, and its bytes if it is a temporary

    def pieces(self, limit: int) -> list[_Piece]:
        """The fewest pieces of at most this size each, in order; if that is impossible, the smallest pieces."""
        return list(self._split(_Piece(self.makes, frozenset()), limit))

    @functools.cached_property
    def least_nbytes(self) -> int:
        return max(map(self._nbytes, self.pieces(0)))

    def needed(self, piece: _Piece) -> list[Instruction]:
        """Its producers, in order, with parameters and given values."""
        return backward_slice(self.fused.ops, piece.makes, piece.given)

    def _names(self, piece: _Piece) -> set[str]:
        return {op.name for op in self.needed(piece)}

    def _nbytes(self, piece: _Piece) -> int:
        """There while a piece runs: what it reads and writes."""
        names = self._names(piece)
        there = {self.sources[name] for name in names if name in self.sources}
        made = [self.fused.ops[name].nbytes for name in (*piece.makes, *(piece.given & names))]
        return sum(nbytes for _, nbytes in there) + sum(made)

    def _split(self, piece: _Piece, limit: int) -> Iterator[_Piece]:
        nbytes = self._nbytes(piece)
        if nbytes <= limit:
            yield piece
            return
        splits = [(max(loads := [*map(self._nbytes, pair)]), sum(loads), pair) for pair in self._pairs(piece)]
        best = min(splits, key=lambda split: split[:2], default=None)
        if best is None or best[0] >= nbytes:
            yield piece
            return
        for one in best[2]:
            yield from self._split(one, limit)

    def _pairs(self, piece: _Piece) -> Iterator[tuple[_Piece, _Piece]]:
        """Pairs of pieces that do the same; what both do is cheap."""
        for op in self.needed(piece):
            rest = tuple(name for name in piece.makes if name != op.name)
            first = _Piece((op.name,), piece.given)
            if op.name in piece.given or op.opcode == "parameter" or not rest:
                continue
            seconds = [_Piece(rest, piece.given)] if op.name in piece.makes else []
            if self._may_end_in(op):
                seconds.append(_Piece(rest, piece.given | {op.name}))
            for second in seconds:
                both = self._names(first) & self._names(second) - {op.name} - piece.given
                if all(self.fused.ops[name].opcode in CHEAP for name in both):
                    yield first, second

    def _may_end_in(self, op: Instruction) -> bool:
        return op.opcode in ELEMENTWISE and keeps_bits(self.fused, op)


def _splittable(module: Module, body: Computation, kernel: Kernel, problem: Problem) -> _Fusion | None:
    """A kernel that may be split: its results lie over nothing that it reads by necessity."""
    op = body.ops[kernel.name]
    if op.opcode != "fusion" or op.attribute("kind") != "kLoop" or op.root or has_tuple_readers(body, op):
        return None
    fused = module[op.called[0]]
    read = [user.index for user, _ in body.uses[op.name]] if isinstance(op.shape, tuple) else [0]
    if not _has_own_places(problem, kernel) or len(fused.results) != len(op.result):
        return None
    temporary = {one.name: one.nbytes if one.role is Role.TEMPORARY else 0 for one in problem.buffers}
    given = {number: buffer_of(body, operand) for number, operand in enumerate(op.operands)}
    sources = {
        one.name: (given[number], temporary.get(given[number], one.nbytes)) for number, one in fused.parameters.items()
    }
    makes = tuple(dict.fromkeys(fused.results[leaf].name for leaf in read))
    found = _Fusion(op, fused, makes, sources)
    return found if makes and sources.keys().isdisjoint(makes) else None


def _has_own_places(problem: Problem, kernel: Kernel) -> bool:
    """Are all results of a kernel temporaries with places of their own?"""
    own = [problem.buffers[number] for number in kernel.writes]
    return all(one.role is Role.TEMPORARY and len(problem.alias_sets[one.alias_set]) == 1 for one in own)


def _nbytes(problem: Problem, kernel: Kernel) -> int:
    buffers = [problem.buffers[number] for number in {*kernel.reads, *kernel.writes}]
    return sum(buffer.nbytes for buffer in buffers if buffer.role is Role.TEMPORARY)


@dataclass
class _BodyRewriter:
    """One computation."""

    body: Computation
    names: Names
    # of every fusion in pieces, and of elements of what is left of its tuple, those that stand in their place
    lines: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)  # what the pieces call
    # elements of a tuple that a piece makes alone, and that piece
    instead: dict[str, str] = field(default_factory=dict)

    def split(self, fusion: _Fusion, pieces: Sequence[_Piece]) -> None:
        """Every piece makes one result but for the last, which has the name of the whole."""
        op, made, last = fusion.op, dict[str, str](), pieces[-1]
        self.lines[op.name] = []
        for piece in pieces:
            name = op.name if piece is last else self.names.fresh(op.name, "part")
            self.lines[op.name].append(self._line(fusion, piece, name, made))
            made.update((result, name) for result in piece.makes)
        for element, _ in self.body.uses[op.name] if isinstance(op.shape, tuple) else ():
            result = fusion.fused.results[element.index].name
            if result in last.makes and len(last.makes) > 1:
                self.lines[element.name] = [renumber(element, last.makes.index(result))]
            else:
                self.lines[element.name] = []
                self.instead[element.name] = made[result]

    def _line(self, fusion: _Fusion, piece: _Piece, name: str, made: Mapping[str, str]) -> str:
        """The piece's, beside the text of what it calls."""
        op, fused = fusion.op, fusion.fused
        ops, parameters, operands = list[Instruction](), list[tuple[str, Shape]](), list[str]()
        for one in fusion.needed(piece):
            if one.name not in piece.given and one.opcode != "parameter":
                ops.append(one)
                continue
            parameters.append((one.name, one.shape))
            operands.append(made[one.name] if one.name in piece.given else op.operands[int(one.attributes)])
        ops = with_root(ops, [fused.ops[result] for result in piece.makes], self.names.fresh(fused.root.name, "part"))
        called = self.names.fresh(fused.name, "part")
        line, self.bodies[called] = new_fusion(op, name, called, operands, parameters, ops)
        return line.line

    def texts(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """All computations, with those that are new in front of this one."""
        lines = (line for op in self.body.ops.values() for line in self.lines.get(op.name, [op.line]))
        text = self.body.text_with(rename_operands(read_instruction(line), self.instead) for line in lines)
        return insert(texts, self.body.name, text, self.bodies)
