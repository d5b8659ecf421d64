"""A scheduled module -> one in which the fusions that crowd the device run in parts.

What a fusion reads and writes is there at once, and no plan goes below it. Where that nearly fills the budget, the
fusion becomes several, one right after the other: some of its results first, or a value inside of it, mostly a mask of
one byte an element, that one part writes and the next reads. What only one of them reads is away while the other runs.
ResNet-50 at batch 1152 on a V100: five fusions in two parts each; the floor falls from 13.8 to 11.2 GiB, and the step
takes 0.7 % longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from memplan.planning.problem import Kernel, Problem, Role
from memplan.xla.module import Computation, Instruction, Module, Names, Shape, read_instruction, with_loops
from memplan.xla.rewrites.fusion import CHEAP, calling, fused_text, renamed, returning, rewritten, source
from memplan.xla.rewrites.rounding import keeps_bits
from memplan.xla.sharing import ELEMENTWISE

NEARLY = 0.9  # of the budget: ResNet-50 in 1250 MiB has one such kernel; its parts spare the smallest plan 23 MiB


def in_parts(module: Module, problem: Problem, budget_nbytes: int) -> Module | None:
    """The module with those fusions in parts; None where there are none.

    Nothing is cut finer than the largest kernel that stays whole, so that a budget of 0 is the lowest one.

    Args:
      problem: the module's, by `problem_of`.
      budget_nbytes: what temporaries may take.
    """
    bodies = {op.name: body for body in with_loops(module, module.entry) for op in body.ops.values()}
    limit, fusions = int(NEARLY * budget_nbytes), list[_Fusion]()
    for kernel in sorted(problem.kernels, key=functools.partial(_nbytes, problem), reverse=True):
        if (nbytes := _nbytes(problem, kernel)) <= limit:
            break
        fusion = _fusion(module, bodies[kernel.name], kernel, problem) if kernel.name in bodies else None
        limit = max(limit, fusion.least_nbytes if fusion else nbytes)
        fusions += [fusion] if fusion else []
    names, writings = Names(module), dict[str, _Writing]()
    for fusion in fusions:
        if len(parts := fusion.parts(limit)) > 1:
            body = bodies[fusion.op.name]
            writings.setdefault(body.name, _Writing(body, names)).part(fusion, parts)
    texts = module.texts
    for writing in writings.values():
        texts = writing.texts(texts)
    return Module(module.head, texts, module.entry_name, module) if writings else None


@dataclass(frozen=True)
class _Part:
    """A fusion of its own.

    Attributes:
      makes: instructions of the whole fusion's computation that it returns.
      given: those that parts before it return and it reads.
    """

    makes: tuple[str, ...]
    given: frozenset[str]


@dataclass(frozen=True)
class _Fusion:
    """A fusion that may run in parts.

    Attributes:
      makes: results that are read.
      sources: of every parameter the buffer, and its bytes if it is a temporary.
    """

    op: Instruction
    fused: Computation
    makes: tuple[str, ...]
    sources: Mapping[str, tuple[str, int]]

    def parts(self, limit: int) -> list[_Part]:
        """As few as take no more bytes than that each, in order; where that cannot be, as small as can be."""
        return list(self._cut(_Part(self.makes, frozenset()), limit))

    def nbytes(self, part: _Part) -> int:
        """There while a part runs: what it reads and writes."""
        there = {self.sources[name] for name in self._needs(part) if name in self.sources}
        made = [self.fused.ops[name].nbytes for name in (*part.makes, *(part.given & self._needs(part)))]
        return sum(nbytes for _, nbytes in there) + sum(made)

    @functools.cached_property
    def least_nbytes(self) -> int:
        return max(map(self.nbytes, self.parts(0)))

    def needed(self, part: _Part) -> list[Instruction]:
        """What makes it, in order; parameters and what it is given are among them."""
        wanted = self._needs(part)
        return [op for op in self.fused.ops.values() if op.name in wanted]

    def _needs(self, part: _Part) -> Set[str]:
        found, todo = set(part.makes), list(part.makes)
        while todo:
            name = todo.pop()
            more = () if name in part.given else self.fused.ops[name].operands
            todo += [operand for operand in more if operand not in found]
            found.update(more)
        return found

    def _cut(self, part: _Part, limit: int) -> Iterator[_Part]:
        nbytes = self.nbytes(part)
        if nbytes <= limit:
            yield part
            return
        ways = [(max(loads := [*map(self.nbytes, way)]), sum(loads), way) for way in self._ways(part)]
        best = min(ways, key=lambda way: way[:2], default=None)
        if best is None or best[0] >= nbytes:
            yield part
            return
        for one in best[2]:
            yield from self._cut(one, limit)

    def _ways(self, part: _Part) -> Iterator[tuple[_Part, _Part]]:
        """Pairs of parts that do the same; what both do is cheap."""
        for op in self.needed(part):
            rest = tuple(name for name in part.makes if name != op.name)
            first = _Part((op.name,), part.given)
            if op.name in part.given or op.opcode == "parameter" or not rest:
                continue
            seconds = [_Part(rest, part.given)] if op.name in part.makes else []
            if self._may_end_in(op):
                seconds.append(_Part(rest, part.given | {op.name}))
            for second in seconds:
                both = self._needs(first) & self._needs(second) - {op.name} - part.given
                if all(self.fused.ops[name].opcode in CHEAP for name in both):
                    yield first, second

    def _may_end_in(self, op: Instruction) -> bool:
        return op.opcode in ELEMENTWISE and keeps_bits(self.fused, op)


def _fusion(module: Module, body: Computation, kernel: Kernel, problem: Problem) -> _Fusion | None:
    """A kernel that may run in parts: its results lie over nothing that it reads by necessity."""
    op = body.ops[kernel.name]
    if op.opcode != "fusion" or op.attribute("kind") != "kLoop" or op.root:
        return None
    fused, several = module[op.called[0]], isinstance(op.shape, tuple)
    read = _read(body, op) if several else [0]
    if read is None or not _apart(problem, kernel) or len(fused.results) != len(op.result):
        return None
    temporary = {one.name: one.nbytes if one.role is Role.TEMPORARY else 0 for one in problem.buffers}
    given = {number: source(body, operand) for number, operand in enumerate(op.operands)}
    sources = {
        one.name: (given[number], temporary.get(given[number], one.nbytes)) for number, one in fused.parameters.items()
    }
    makes = tuple(dict.fromkeys(fused.results[leaf].name for leaf in read))
    found = _Fusion(op, fused, makes, sources)
    return found if makes and sources.keys().isdisjoint(makes) else None


def _apart(problem: Problem, kernel: Kernel) -> bool:
    """Are all results of a kernel temporaries with places of their own?"""
    own = [problem.buffers[number] for number in kernel.writes]
    return all(one.role is Role.TEMPORARY and len(problem.places[one.place]) == 1 for one in own)


def _read(body: Computation, op: Instruction) -> list[int] | None:
    """The elements of a tuple that are read; None where the tuple itself is."""
    users = [user for user, _ in body.uses[op.name]]
    return [user.index for user in users] if all(user.opcode == "get-tuple-element" for user in users) else None


def _nbytes(problem: Problem, kernel: Kernel) -> int:
    buffers = [problem.buffers[number] for number in {*kernel.reads, *kernel.writes}]
    return sum(buffer.nbytes for buffer in buffers if buffer.role is Role.TEMPORARY)


@dataclass
class _Writing:
    """One computation.

    Attributes:
      lines: of every fusion in parts, and of elements of what is left of its tuple, those that stand in their place.
      bodies: what the parts call.
      instead: elements of a tuple that a part makes alone, and that part.
    """

    body: Computation
    names: Names
    lines: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)

    def part(self, fusion: _Fusion, parts: Sequence[_Part]) -> None:
        """Every part makes one result but for the last, which has the name of the whole."""
        op, made, last = fusion.op, dict[str, str](), parts[-1]
        self.lines[op.name] = []
        for part in parts:
            name = op.name if part is last else self.names.fresh(op.name, "part")
            self.lines[op.name].append(self._line(fusion, part, name, made))
            made.update((result, name) for result in part.makes)
        for element, _ in self.body.uses[op.name] if isinstance(op.shape, tuple) else ():
            result = fusion.fused.results[element.index].name
            if result in last.makes and len(last.makes) > 1:
                index = f"index={last.makes.index(result)}"
                self.lines[element.name] = [element.line.replace(f"index={element.index}", index, 1)]
            else:
                self.lines[element.name] = []
                self.instead[element.name] = made[result]

    def _line(self, fusion: _Fusion, part: _Part, name: str, made: Mapping[str, str]) -> str:
        """The part's, beside the text of what it calls."""
        op, fused = fusion.op, fusion.fused
        ops, parameters, operands = list[Instruction](), list[tuple[str, Shape]](), list[str]()
        for one in fusion.needed(part):
            if one.name not in part.given and one.opcode != "parameter":
                ops.append(one)
                continue
            parameters.append((one.name, one.shape))
            operands.append(made[one.name] if one.name in part.given else op.operands[int(one.attributes)])
        ops = returning(ops, [fused.ops[result] for result in part.makes], self.names.fresh(fused.root.name, "part"))
        called = self.names.fresh(fused.name, "part")
        self.bodies[called] = fused_text(called, parameters, ops)
        return calling(op, name, ops[-1].shape, operands, called)

    def texts(self, texts: Mapping[str, str]) -> dict[str, str]:
        """All computations, with those that are new in front of this one."""
        first, *_, last = self.body.text.split("\n")
        lines = [line for op in self.body.ops.values() for line in self.lines.get(op.name, [op.line])]
        text = "\n".join([first, *(renamed(read_instruction(line), self.instead) for line in lines), last])
        return rewritten(texts, self.body.name, text, self.bodies)
