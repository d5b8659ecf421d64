"""A computation of a module: every value's meaning, the order, and reads of lost values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from memplan.errors import MemplanError
from memplan.verify.expressions import (
    Expressions,
    FusionMeanings,
    Meaning,
    ModuleExpressions,
    is_copy,
    is_library,
)
from memplan.verify.overwrites import (
    LeafTree,
    ResultLeaf,
    Updates,
    Versions,
    first_result,
    leaves_in,
    tree_of,
)
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_ONCE = frozenset(
    """
    infeed outfeed send recv while conditional call after-all add-dependency
    rng rng-bit-generator rng-get-and-update-state
    """.split()  # noqa: SIM905
)
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")  # how their opcodes begin
_GATHERS = frozenset({"all-gather", "all-gather-start", "all-gather-done"})
_PURE_STARTS = ("fusion-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
_UNDER_WAY: Meaning = (-1, 0)  # nothing yet


class NotThePlainModuleError(MemplanError):
    """A planned module is not the plain one, or reads a lost value. Always a bug in memplan."""

    guide = "trust#judge"


def require(holds: bool, failure: str) -> None:
    if not holds:
        report = "This is a bug in memplan; nothing was run. Please report it."
        raise NotThePlainModuleError(f"The planned module {failure}. {report}")


def entry_dataflow(module: Module, expressions: Expressions) -> Dataflow:
    """Dataflow of the entry, whose outputs may overwrite donated arguments."""
    arguments = {number: ResultLeaf(op.name, 0) for number, op in module.entry.parameters.items()}
    overwritten = {output: arguments[argument] for output, argument in module.aliases.items()}
    return Dataflow(module, module.entry, ModuleExpressions(module, expressions), overwritten)


class Dataflow:
    """The entry, the body or condition of a loop, a branch, or a called computation.

    Attributes:
      expressions: of every instruction; for a fusion, of its results.
      results: instruction -> the meanings of its results.
      computed: all expressions, and those inside fusions.
      effects: expressions with effects, in order, without collectives: all devices run the same
        module, and so the same collectives in the same order.
      single: expressions that may not run more often; all-gathers and the starts of pure fusions
        may.
      loops: conditions and bodies, branches and called computations, in order.
    """

    def __init__(
        self,
        module: Module,
        body: Computation,
        expressions: ModuleExpressions,
        overwritten: Mapping[int, ResultLeaf],
    ) -> None:
        """`overwritten` maps outputs to the leaf of an argument that they overwrite."""
        self._module = module
        self._body = body
        self._expressions = expressions
        self._updates = Updates(module)
        self._versions = Versions()
        self._trees: dict[str, LeafTree] = {}
        self._means: dict[ResultLeaf, Meaning] = {}
        self._copies: dict[str, ResultLeaf] = {}  # copies under way -> their source
        # started operations -> their operands, which they read until they are done
        self._pairs: dict[str, list[ResultLeaf]] = {}
        self._fusions: dict[str, FusionMeanings] = {}
        self.expressions: dict[str, int] = {}
        self.results: dict[str, list[Meaning]] = {}
        self.computed: set[Meaning] = set()
        self.effects: list[int] = []
        self.single: list[int] = []
        self.loops: list[Dataflow] = []
        for position, op in enumerate(body.ops.values()):
            self._versions.written[op.name] = -1 if op.opcode == "parameter" else position
            self._read(op, position)
        outputs = list(leaves_in(self._trees[body.root.name]))
        self.outputs = [self._means[leaf] for leaf in outputs]
        self._end(outputs, overwritten)

    @property
    def meaning(self) -> int:
        """The meaning of a loop's computation, independent of recomputation and order in it."""
        counts = tuple(sorted(Counter(self.single).items()))
        key = ("loop", tuple(self.outputs), tuple(self.effects), counts)
        return self._expressions.all.number(key)

    def _read(self, op: Instruction, position: int) -> None:
        for name in op.operands:
            require(name in self._trees, f"reads {name} in {op.name} before it is made")
        operands = [self._trees[name] for name in op.operands]
        if op.opcode in ("bitcast", "opt-barrier") and isinstance(op.shape, Array):
            self._view(op, _array(operands[0], op))
        elif op.opcode == "opt-barrier":
            self._trees[op.name] = operands[0]
        elif op.opcode == "get-tuple-element":
            (elements,) = operands
            is_tuple = not isinstance(elements, ResultLeaf)
            require(is_tuple, f"takes an element of what is no tuple in {op.name}")
            assert not isinstance(elements, ResultLeaf)
            self._trees[op.name] = elements[op.index]
        elif op.opcode == "tuple":
            self._trees[op.name] = tuple(operands)
        elif op.opcode == "copy-start":
            self._begin_copy(op, _array(operands[0], op))
        elif op.opcode == "copy-done":
            self._end_copy(op, position)
        else:
            self._kernel(op, operands, position)

    def _view(self, op: Instruction, source: ResultLeaf) -> None:
        """An alias of a buffer may have another shape: the reader's expression contains it."""
        source_shape = self._body.ops[op.operands[0]].shape
        view = ResultLeaf(op.name, 0)
        self._means[view] = self._expressions.all.view(op.shape, self._means[source], source_shape)
        self._versions.name(view, source)
        self._trees[op.name] = view

    def _begin_copy(self, op: Instruction, source: ResultLeaf) -> None:
        done = self._means[source] != _UNDER_WAY
        require(done, f"copies in {op.name} a copy that is under way")
        copy = ResultLeaf(op.name, 0)
        self._trees[op.name] = copy
        self._means[copy] = _UNDER_WAY
        self._copies[op.name] = source

    def _end_copy(self, op: Instruction, position: int) -> None:
        """A copy has the meaning of its source.

        It reads the source until here, and writes its own buffer from its start on.
        """
        (start,) = op.operands
        require(start in self._copies, f"ends {start} in {op.name}, which is not under way")
        source = self._copies.pop(start)
        self._versions.read(source, position, op.name)
        copy = ResultLeaf(start, 0)
        self._trees[op.name] = copy
        self._means[copy] = self._means[source]
        self._trees[start] = ()

    def _kernel(self, op: Instruction, operands: Sequence[LeafTree], position: int) -> None:
        sources = [leaf for tree in operands for leaf in leaves_in(tree)]
        for leaf in sources:
            done = self._means[leaf] != _UNDER_WAY
            require(done, f"reads in {op.name} a copy that is under way")
            self._versions.read(leaf, position, op.name)
        self._extend_pair(op, sources, position)
        tree = tree_of(op.name, op.shape)
        self._trees[op.name] = tree
        number = self._expressions.all.number
        if op.opcode == "fusion" and not is_library(op):
            results = self._fusion(op, operands)
            expression = number(("fusion", *results))
        elif is_copy(op, self._body):
            results = [self._means[leaf] for leaf in sources]
            expression = number(("copy", *results))
        else:
            stated = self._expressions.stated(op, self._called(op))
            expression = number((stated, tuple(self._means[leaf] for leaf in sources)))
            results = [(expression, leaf) for leaf in range(len(op.result))]
        self.expressions[op.name] = expression
        self.results[op.name] = results
        self.computed.update(results)
        self._means.update(zip(leaves_in(tree), results, strict=True))
        overwrites = self._overwrite(op, operands, position)
        self._count(op, expression, overwrites)

    def _count(self, op: Instruction, expression: int, overwrites: bool) -> None:
        """Note an expression that has effects or may not run more often."""
        is_collective = op.opcode.startswith(_COLLECTIVES)
        begins = op.opcode.endswith("-start") and not is_collective and not _is_pure(op)
        has_effect = begins or op.has_side_effect or op.opcode in _ONCE
        if has_effect:
            self.effects.append(expression)
        if has_effect or overwrites or (is_collective and op.opcode not in _GATHERS):
            self.single.append(expression)

    def _fusion(self, op: Instruction, operands: Sequence[LeafTree]) -> list[Meaning]:
        """The meanings of a fusion's results."""
        sources = tuple(tuple(self._means[leaf] for leaf in leaves_in(tree)) for tree in operands)
        same = op.result == self._module[op.called[0]].root.result
        require(same, f"has another shape in {op.name} than what it calls")
        meanings = self._expressions.fusion(op, sources)
        self._fusions[op.name] = meanings
        self.computed.update(meanings.computed)
        return meanings.results

    def _overwrite(self, op: Instruction, operands: Sequence[LeafTree], position: int) -> bool:
        """Note the operands that a kernel overwrites; returns whether there are any."""
        updates = list(self._updates.of(op, operands))
        if op.opcode == "while":
            unchanged = self._updates.unchanged(op)
            for number, carry in enumerate(leaves_in(operands[0])):
                if number in unchanged:
                    self._versions.name(ResultLeaf(op.name, number), carry)
        for number, buffer in updates:
            result = None if number is None else ResultLeaf(op.name, number)
            self._versions.overwrite(buffer, position, op.name, result)
        return bool(updates)

    def _extend_pair(self, op: Instruction, sources: list[ResultLeaf], position: int) -> None:
        """Let an asynchronous pair read operands until its end and write from its start on."""
        if op.opcode.endswith("-start"):
            self._pairs[op.name] = sources
            return
        start = self._body.ops[op.operands[0]] if op.opcode.endswith("-done") else None
        if start is None or not start.opcode.endswith("-start"):
            return
        is_pending = start.name in self._pairs
        require(is_pending, f"ends {start.name} in {op.name}, which is not under way")
        self._versions.written[op.name] = self._versions.written[start.name]
        for leaf in self._pairs.pop(start.name):
            self._versions.read(leaf, position, op.name)
        first = first_result(start)
        for number in range(len(op.result)):
            self._versions.name(ResultLeaf(op.name, number), ResultLeaf(start.name, first + number))

    def _called(self, op: Instruction) -> tuple[int, ...]:
        if op.opcode in ("call", "conditional"):
            return tuple(self._loop(name, False) for name in op.called)
        if op.opcode != "while":
            return self._expressions.called(op)
        return self._loop(op.condition, False), self._loop(op.body, True)

    def _loop(self, name: str, carries: bool) -> int:
        """A loop's condition or a branch; or a loop's body, whose results overwrite its carries."""
        body = self._module[name]
        state = body.parameters[0]
        numbers = range(len(state.result)) if carries else ()
        overwritten = {number: ResultLeaf(state.name, number) for number in numbers}
        self.loops.append(Dataflow(self._module, body, self._expressions, overwritten))
        return self.loops[-1].meaning

    def _end(self, outputs: Sequence[ResultLeaf], overwritten: Mapping[int, ResultLeaf]) -> None:
        """Let outputs overwrite arguments when their buffer is first written, and be read last."""
        pending = [*self._copies, *self._pairs]
        require(not pending, f"never waits for {', '.join(pending)}")
        for output, argument in overwritten.items():
            first = self._versions.buffer(outputs[output])
            if first != argument:
                written = self._versions.written[first.instruction]
                self._versions.overwrite(argument, written, first.instruction)
        for leaf in outputs:
            self._versions.read(leaf, len(self._versions.written), "the end")

    def reads_of_overwritten(self) -> dict[Meaning, set[Meaning]]:
        """The uses of overwritten operands inside their fusions, whose threads run in no order."""
        uses: dict[Meaning, set[Meaning]] = {}
        for loss in self._versions.losses():
            if (fusion := self._fusions.get(loss.writer)) is not None:
                meaning = self._means[loss.version]
                uses.setdefault(meaning, set()).update(fusion.readers.get(meaning, ()))
        return uses

    def late_reads(self) -> dict[tuple[int, Meaning], dict[int, str]]:
        """For every overwritten version: its later readers, by expression."""
        late_reads: dict[tuple[int, Meaning], dict[int, str]] = {}
        for loss in self._versions.losses():
            overwrite = self.expressions.get(loss.writer, -2), self._means[loss.version]
            readers = late_reads.setdefault(overwrite, {})
            for position, reader in loss.reads:
                if position > loss.since:
                    readers[self.expressions.get(reader, -3)] = reader
        return late_reads


def _is_pure(start: Instruction) -> bool:
    """Does a start only compute a result?

    Then its reads and overwrites determine when it may run. A custom fusion may contain a
    collective.
    """
    return start.opcode in _PURE_STARTS and not is_library(start)


def _array(tree: LeafTree, op: Instruction) -> ResultLeaf:
    require(isinstance(tree, ResultLeaf), f"{op.name} takes a tuple for an array")
    assert isinstance(tree, ResultLeaf)
    return tree
