"""A computation of a module: the meaning of every value, the order, and reads of overwritten values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from memplan.errors import MemplanError
from memplan.verify.expressions import (
    Expressions,
    FusionMeanings,
    Meaning,
    ModuleExpressions,
    is_library,
    is_same,
    shapes_of,
)
from memplan.verify.overwrites import Place, Tree, Updates, Versions, first_result, places_in, tree_of
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_ONCE = re.compile(r"^(?:infeed|outfeed|send|recv|rng.*|while|conditional|call|after-all|add-dependency)$")
_COLLECTIVE = re.compile(r"^(?:all-|reduce-scatter|collective-|ragged-)")
_GATHER = re.compile(r"^all-gather(?:-start|-done)?$")
_PURE_START = re.compile(r"^(?:fusion|slice|dynamic-slice|dynamic-update-slice)-start$")
_UNDER_WAY: Meaning = (-1, 0)  # nothing yet


class NotThePlainModuleError(MemplanError):
    """A planned module is not the plain one, or reads a lost value. Always a bug in memplan."""

    guide = "trust#judge"


def require(holds: bool, what: str) -> None:
    if not holds:
        raise NotThePlainModuleError(
            f"The planned module {what}. This is a bug in memplan; nothing was run. Please report it."
        )


def entry_dataflow(module: Module, expressions: Expressions) -> Dataflow:
    """Dataflow of the entry, whose outputs may overwrite donated arguments."""
    arguments = {number: Place(op.name, 0) for number, op in module.entry.parameters.items()}
    over = {output: arguments[argument] for output, argument in module.aliases.items()}
    return Dataflow(module, module.entry, ModuleExpressions(module, expressions), over)


class Dataflow:
    """The entry, the body or condition of a loop, a branch, or a called computation.

    Attributes:
      expressions: of every instruction; for a fusion, of its results.
      made: instruction -> the values that it makes.
      computed: all expressions, and those inside of fusions.
      effects: expressions with effects, in order, without collectives: all devices run the same module, and so the
        same collectives in the same order.
      single: expressions that may not run more often; all-gathers and the starts of pure fusions may.
      loops: conditions and bodies, branches and called computations, in order.
    """

    def __init__(
        self, module: Module, body: Computation, expressions: ModuleExpressions, over: Mapping[int, Place]
    ) -> None:
        """`over` maps outputs to the leaf of an argument that they overwrite."""
        self._module, self._body, self._by_text = module, body, expressions
        self._updates, self._versions = Updates(module), Versions()
        self._trees: dict[str, Tree] = {}
        self._means: dict[Place, Meaning] = {}
        self._copies: dict[str, Place] = {}  # copies under way -> their source
        self._pairs: dict[str, list[Place]] = {}  # started operations -> their operands, read until they are done
        self._fusions: dict[str, FusionMeanings] = {}
        self.expressions: dict[str, int] = {}
        self.made: dict[str, list[Meaning]] = {}
        self.computed: set[Meaning] = set()
        self.effects: list[int] = []
        self.single: list[int] = []
        self.loops: list[Dataflow] = []
        for position, op in enumerate(body.ops.values()):
            self._versions.made[op.name] = -1 if op.opcode == "parameter" else position
            self._read(op, position)
        places = list(places_in(self._trees[body.root.name]))
        self.outputs = [self._means[place] for place in places]
        self._end(places, over)

    @property
    def meaning(self) -> int:
        """The meaning of a loop's computation, independent of recomputation and order in it."""
        again = tuple(sorted(Counter(self.single).items()))
        return self._by_text.all.number(("loop", tuple(self.outputs), tuple(self.effects), again))

    def _read(self, op: Instruction, position: int) -> None:
        for name in op.operands:
            require(name in self._trees, f"reads {name} in {op.name} before it is made")
        operands = [self._trees[name] for name in op.operands]
        if op.opcode in ("bitcast", "opt-barrier") and isinstance(op.shape, Array):
            self._view(op, _one(operands[0], op))
        elif op.opcode == "opt-barrier":
            self._trees[op.name] = operands[0]
        elif op.opcode == "get-tuple-element":
            parts = operands[0]
            require(not isinstance(parts, Place), f"takes an element of what is no tuple in {op.name}")
            assert not isinstance(parts, Place)
            self._trees[op.name] = parts[op.index]
        elif op.opcode == "tuple":
            self._trees[op.name] = tuple(operands)
        elif op.opcode == "copy-start":
            self._begin_copy(op, _one(operands[0], op))
        elif op.opcode == "copy-done":
            self._end_copy(op, position)
        else:
            self._kernel(op, operands, position)

    def _view(self, op: Instruction, place: Place) -> None:
        """An alias of a buffer that may have another shape: the reader's expression contains it."""
        source = self._body.ops[op.operands[0]].shape
        view = Place(op.name, 0)
        self._means[view] = self._by_text.all.view(str(op.shape), self._means[place], str(source))
        self._versions.name(view, place)
        self._trees[op.name] = view

    def _begin_copy(self, op: Instruction, source: Place) -> None:
        require(self._means[source] != _UNDER_WAY, f"copies in {op.name} a copy that is under way")
        self._trees[op.name] = copied = Place(op.name, 0)
        self._means[copied] = _UNDER_WAY
        self._copies[op.name] = source

    def _end_copy(self, op: Instruction, position: int) -> None:
        """A copy has the meaning of its source; it reads the source until here, and writes its own buffer from its
        start on.
        """
        start = op.operands[0]
        require(start in self._copies, f"ends {start} in {op.name}, which is not under way")
        source = self._copies.pop(start)
        self._versions.read(source, position, op.name)
        self._trees[op.name] = copied = Place(start, 0)
        self._means[copied] = self._means[source]
        self._trees[start] = ()

    def _kernel(self, op: Instruction, operands: Sequence[Tree], position: int) -> None:
        places = [place for tree in operands for place in places_in(tree)]
        for place in places:
            require(self._means[place] != _UNDER_WAY, f"reads in {op.name} a copy that is under way")
            self._versions.read(place, position, op.name)
        self._extend_pair(op, places, position)
        self._trees[op.name] = tree = tree_of(op.name, op.shape)
        if op.opcode == "fusion" and not is_library(op):
            made = self._fusion(op, operands)
            expression = self._by_text.all.number(("fusion", *made))
        elif op.operands and is_same(op, self._body.ops[op.operands[0]]):
            made = [self._means[place] for place in places]
            expression = self._by_text.all.number(("copy", *made))
        else:
            said = self._by_text.stated(op, self._called(op))
            expression = self._by_text.all.number((*said, tuple(self._means[place] for place in places)))
            made = [(expression, number) for number in range(len(op.result))]
        self.expressions[op.name], self.made[op.name] = expression, made
        self.computed.update(made)
        self._means.update(zip(places_in(tree), made, strict=True))
        updates = self._overwrite(op, operands, position)
        collects = bool(_COLLECTIVE.match(op.opcode))
        begins = op.opcode.endswith("-start") and not collects and not _is_pure(op)
        acts = begins or bool(_EFFECT.search(op.attributes)) or bool(_ONCE.match(op.opcode))
        if acts:
            self.effects.append(expression)
        if acts or updates or (collects and not _GATHER.match(op.opcode)):
            self.single.append(expression)

    def _fusion(self, op: Instruction, operands: Sequence[Tree]) -> list[Meaning]:
        """The meanings of a fusion's results."""
        given = tuple(tuple(self._means[place] for place in places_in(tree)) for tree in operands)
        called = self._module[op.called[0]]
        same = shapes_of(op.shape) == shapes_of(called.root.shape)
        require(same, f"has another shape in {op.name} than what it calls")
        self._fusions[op.name] = found = self._by_text.fusion(op, given)
        self.computed.update(found.made)
        return found.results

    def _overwrite(self, op: Instruction, operands: Sequence[Tree], position: int) -> bool:
        """Note the operands that a kernel overwrites; returns whether there are any."""
        updates = list(self._updates.of(op, operands))
        if op.opcode == "while":
            unchanged = self._updates.unchanged(op)
            for number, place in enumerate(places_in(operands[0])):
                if number in unchanged:
                    self._versions.name(Place(op.name, number), place)
        for leaf, place in updates:
            self._versions.overwrite(place, position, op.name, None if leaf is None else Place(op.name, leaf))
        return bool(updates)

    def _extend_pair(self, op: Instruction, places: list[Place], position: int) -> None:
        """An asynchronous pair reads its operands until its end and writes its result from its start."""
        if op.opcode.endswith("-start"):
            self._pairs[op.name] = places
        elif op.opcode.endswith("-done") and self._body.ops[op.operands[0]].opcode.endswith("-start"):
            start = op.operands[0]
            require(start in self._pairs, f"ends {start} in {op.name}, which is not under way")
            self._versions.made[op.name] = self._versions.made[start]
            read = self._pairs.pop(start)
            for place in read:
                self._versions.read(place, position, op.name)
            first = first_result(self._body.ops[start])
            for leaf in range(len(op.result)):
                self._versions.name(Place(op.name, leaf), Place(start, first + leaf))

    def _called(self, op: Instruction) -> tuple[int, ...]:
        if op.opcode in ("call", "conditional"):
            return tuple(self._loop(name, False) for name in op.called)
        if op.opcode != "while":
            return self._by_text.called(op)
        return self._loop(op.attribute("condition"), False), self._loop(op.attribute("body"), True)

    def _loop(self, name: str, carries: bool) -> int:
        """A loop's condition or a branch; or a loop's body, whose results overwrite its parameters."""
        body = self._module[name.lstrip("%")]
        given = body.parameters[0]
        over = {number: Place(given.name, number) for number in range(len(given.result))} if carries else {}
        self.loops.append(Dataflow(self._module, body, self._by_text, over))
        return self.loops[-1].meaning

    def _end(self, outputs: Sequence[Place], over: Mapping[int, Place]) -> None:
        """Outputs overwrite arguments when their buffer is first written; values live at the end are read there."""
        begun = [*self._copies, *self._pairs]
        require(not begun, f"never waits for {', '.join(begun)}")
        for output, argument in over.items():
            first = self._versions.buffer(outputs[output])
            if first != argument:
                self._versions.overwrite(argument, self._versions.made[first.maker], first.maker)
        for place in outputs:
            self._versions.read(place, len(self._versions.made), "the end")

    def reads_of_overwritten(self) -> dict[Meaning, set[Meaning]]:
        """The uses of overwritten operands inside their fusions, whose threads run in no order."""
        found: dict[Meaning, set[Meaning]] = {}
        for loss in self._versions.losses():
            if (fusion := self._fusions.get(loss.writer)) is not None:
                meaning = self._means[loss.version]
                found.setdefault(meaning, set()).update(fusion.readers.get(meaning, ()))
        return found

    def late_reads(self) -> dict[tuple[int, Meaning], dict[int, str]]:
        """For every overwritten version: its later readers, by expression."""
        found: dict[tuple[int, Meaning], dict[int, str]] = {}
        for loss in self._versions.losses():
            late = found.setdefault((self.expressions.get(loss.writer, -2), self._means[loss.version]), {})
            readers = (reader for position, reader in loss.reads if position > loss.since)
            late.update((self.expressions.get(reader, -3), reader) for reader in readers)
        return found


def _is_pure(start: Instruction) -> bool:
    """It starts to compute a result and does nothing else: its reads and overwrites determine when it may run.

    A custom fusion may contain a collective.
    """
    return bool(_PURE_START.match(start.opcode)) and not is_library(start)


def _one(tree: Tree, op: Instruction) -> Place:
    require(isinstance(tree, Place), f"{op.name} takes a tuple for an array")
    assert isinstance(tree, Place)
    return tree
