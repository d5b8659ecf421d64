"""The judge of plans: is a planned module the plain one, with clones, copies to the host and another order?

It shares nothing with what plans and writes. Every value of the planned module is named by what it is computed from,
clones, copies and fusions looked through, and must be one of the plain module's; the outputs must be the same ones.
Buffers are not in that form: what was overwritten in place, be it a donated argument, what is updated or what a loop
carries, may be read no more, but by what reads it there in the plain module too.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.errors import MemplanError
from memplan.xla.module import Array, Computation, Instruction, Module, Shape, leaves

Meaning = tuple[int, int]  # number of an expression, leaf


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of what an instruction makes."""

    maker: str
    leaf: int


Tree = Place | tuple["Tree", ...]

_NAMES = re.compile(r"%[\w.\-]+")
_CALLED = re.compile(r"(?:to_apply|calls)=%([\w.\-]+)")
_FRAME = re.compile(r" ?stack_frame_id=\d+")
_QUEUE = re.compile(r'"(?:operation_queue_id|wait_on_operation_queues)":(?:"[^"]*"|\[[^\]]*\]),?')
_ORIGIN = re.compile(r",? ?(?:metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^}]*\})*\}|control-predecessors=\{[^}]*\})")
_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_ONCE = re.compile(
    r"^(?:infeed|outfeed|send|recv|rng.*|(?:all|reduce|collective)-.*|while|conditional|call|after-all|add-dependency)$"
)
_ADDED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")
_PAIR = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
_UPDATES = ("dynamic-update-slice", "scatter")
_ORDERED = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter", "dot", "convolution", "sort"})
_UNDER_WAY: Meaning = (-1, 0)  # nothing yet


class NotThePlainModuleError(MemplanError):
    """A planned module is not the plain one, or reads what is no longer there. Always a bug of memplan's."""


def judge(plain: Module, planned: Module) -> None:
    """Accept a planned module.

    Raises:
      NotThePlainModuleError: it computes something else, with the instruction.
    """
    meanings = _Meanings()
    _require(plain.aliases == planned.aliases, "donates other arguments")
    _compare(*(_Reading(module, module.entry, meanings, _donated(module)) for module in (plain, planned)))


def _compare(first: _Reading, second: _Reading) -> None:
    """A computation of the plain module and one of the planned module; then their loops, one by one."""
    for name, made in second.made.items():
        _require(first.computed.issuperset(made), f"computes by {name} what the plain module does not")
    _require(first.outputs == second.outputs, "returns other values")
    _require(first.effects == second.effects, "has other effects, or in another order")
    missing = Counter(first.single) - Counter(second.single)
    _require(not missing, "lacks what must run")
    more = Counter(second.single) - Counter(first.single)
    _require(not more, "runs again what updates in place or has effects")
    within = first.reads_of_overwritten()
    for meaning, readers in second.reads_of_overwritten().items():
        _require(readers <= within.get(meaning, set()), "reads in a fusion what that one overwrites")
    allowed = first.late_reads()
    for overwriting, readers in second.late_reads().items():
        known = allowed.get(overwriting, {})
        wrong = {expression: name for expression, name in readers.items() if expression not in known}
        _require(not wrong, f"reads in {', '.join(wrong.values())} what was overwritten before")
    for one, other in zip(first.loops, second.loops, strict=True):
        _compare(one, other)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotThePlainModuleError(
            f"The planned module {what}. That is a bug of memplan's; nothing was run. Please report it."
        )


@dataclass
class _Meanings:
    """Expressions by number: the same for the same, in both modules."""

    numbers: dict[object, int] = field(default_factory=dict)
    origins: dict[Meaning, tuple[Meaning, str]] = field(default_factory=dict)  # of views: whose they are, of what shape
    fusions: dict[object, _Inside] = field(default_factory=dict)
    updates: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of fusions: leaf, number of a parameter
    bare: dict[str, str] = field(default_factory=dict)  # texts of computations without their names and stack frames

    def of(self, expression: object) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))

    def without_frames(self, text: str) -> str:
        if text not in self.bare:
            self.bare[text] = _FRAME.sub("", text.partition("\n")[2])
        return self.bare[text]

    def view(self, shape: str, given: Meaning, source_shape: str) -> Meaning:
        """The same bytes in another shape; a view of a view is one of what that is of."""
        origin, original = self.origins.get(given, (given, source_shape))
        if shape == original:
            return origin
        found = self.of(("view", shape, origin)), 0
        self.origins[found] = origin, original
        return found


@dataclass(frozen=True)
class _Inside:
    """A fusion: what its results mean, what is made in it, and of what it is given, what instructions make of that."""

    results: list[Meaning]
    made: set[Meaning]
    readers: dict[Meaning, set[Meaning]]


class _Reading:
    """The entry, or the body or condition of a loop: what every value means, and who reads what was overwritten.

    A value is a version of a buffer: what is updated in place is another version of the same buffer.

    Attributes:
      expressions: of every instruction; of a fusion, of its results.
      made: of every instruction, the values that it makes.
      computed: all of them, and those inside of fusions.
      effects: expressions of what acts, in order.
      single: expressions of what may run only as often as it did.
      loops: conditions and bodies, in order.
    """

    def __init__(self, module: Module, body: Computation, meanings: _Meanings, over: Mapping[int, Place]) -> None:
        """`over` says of outputs which leaf of an argument they are written over."""
        self._module, self._body, self._meanings = module, body, meanings
        self._bodies: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        self._trees: dict[str, Tree] = {}
        self._means: dict[Place, Meaning] = {}
        self._reads: dict[Place, list[tuple[int, str]]] = {}  # of a version: position and reader
        self._made: dict[str, int] = {}  # position from which on the results are being written
        self._views: dict[Place, Place] = {}  # names -> the version that they name
        self._buffers: dict[Place, Place] = {}  # versions -> the first version in the same buffer
        self._overwritten: list[tuple[str, Place, int]] = []
        self._copies: dict[str, Place] = {}  # under way -> what they are copies of
        self._held: dict[str, list[Place]] = {}  # what began -> what it reads until it is done
        self._fusions: dict[str, _Inside] = {}
        self.expressions: dict[str, int] = {}
        self.made: dict[str, list[Meaning]] = {}
        self.computed: set[Meaning] = set()
        self.effects: list[int] = []
        self.single: list[int] = []
        self.loops: list[_Reading] = []
        for position, op in enumerate(body.ops.values()):
            self._made[op.name] = -1 if op.opcode == "parameter" else position
            self._read(op, position)
        places = list(_places(self._trees[body.root.name]))
        self.outputs = [self._means[place] for place in places]
        self._end(places, over)

    @property
    def meaning(self) -> int:
        """What a loop's computation does, whatever runs again in it and in which order."""
        again = tuple(sorted(Counter(self.single).items()))
        return self._meanings.of(("loop", tuple(self.outputs), tuple(self.effects), again))

    def _read(self, op: Instruction, position: int) -> None:
        for name in op.operands:
            _require(name in self._trees, f"reads {name} in {op.name} before it is made")
        operands = [self._trees[name] for name in op.operands]
        if op.opcode in ("bitcast", "opt-barrier") and isinstance(op.shape, Array):
            self._view(op, _one(operands[0], op))
        elif op.opcode == "opt-barrier":
            self._trees[op.name] = operands[0]
        elif op.opcode == "get-tuple-element":
            parts = operands[0]
            _require(not isinstance(parts, Place), f"takes an element of what is no tuple in {op.name}")
            assert not isinstance(parts, Place)
            self._trees[op.name] = parts[op.index]
        elif op.opcode == "tuple":
            self._trees[op.name] = tuple(operands)
        elif op.opcode == "copy-start":
            self._copy(op, _one(operands[0], op))
        elif op.opcode == "copy-done":
            self._copied(op, position)
        else:
            self._kernel(op, operands, position)

    def _view(self, op: Instruction, place: Place) -> None:
        """A name for a buffer that may have another shape: the reader's expression says which."""
        source = self._body.ops[op.operands[0]].shape
        view = Place(op.name, 0)
        self._means[view] = self._meanings.view(str(op.shape), self._means[place], str(source))
        self._views[view] = self._version(place)
        self._trees[op.name] = view

    def _version(self, place: Place) -> Place:
        return self._views.get(place, place)

    def _buffer(self, place: Place) -> Place:
        """The first version in the buffer of this one."""
        version = self._version(place)
        return self._buffers.get(version, version)

    def _copy(self, op: Instruction, source: Place) -> None:
        _require(self._means[source] != _UNDER_WAY, f"copies in {op.name} a copy that is under way")
        self._trees[op.name] = copied = Place(op.name, 0)
        self._means[copied] = _UNDER_WAY
        self._copies[op.name] = source

    def _copied(self, op: Instruction, position: int) -> None:
        """A copy is what it is a copy of; its source is read until here, its own buffer written from its start on."""
        start = op.operands[0]
        _require(start in self._copies, f"ends {start} in {op.name}, which is not under way")
        source = self._copies.pop(start)
        self._note(source, position, op.name)
        self._trees[op.name] = copied = Place(start, 0)
        self._means[copied] = self._means[source]
        self._trees[start] = ()

    def _kernel(self, op: Instruction, operands: Sequence[Tree], position: int) -> None:
        places = [place for tree in operands for place in _places(tree)]
        for place in places:
            _require(self._means[place] != _UNDER_WAY, f"reads in {op.name} a copy that is under way")
            self._note(place, position, op.name)
        self._keep_pair(op, places, position)
        self._trees[op.name] = tree = _tree(op.name, op.shape)
        if op.opcode == "fusion" and op.attribute("kind") != "kCustom":
            made = self._fused(op, operands)
            expression = self._meanings.of(("fusion", *made))
        else:
            expression = self._meanings.of((*self._said(op), tuple(self._means[place] for place in places)))
            made = [(expression, number) for number in range(len(op.result))]
        self.expressions[op.name], self.made[op.name] = expression, made
        self.computed.update(made)
        self._means.update(zip(_places(tree), made, strict=True))
        updates = list(self._updates(op, operands))
        for leaf, place in updates:
            self._overwritten.append((op.name, place, position))
            if leaf is not None:
                self._buffers[Place(op.name, leaf)] = self._buffer(place)
        acts = bool(_EFFECT.search(op.attributes)) or bool(_ONCE.match(op.opcode)) or op.opcode.endswith("-start")
        if acts:
            self.effects.append(expression)
        if acts or updates:
            self.single.append(expression)

    def _fused(self, op: Instruction, operands: Sequence[Tree]) -> list[Meaning]:
        """What a fusion's results mean, by the instructions in it; where an order matters, its emitter does too."""
        given = tuple(tuple(self._means[place] for place in _places(tree)) for tree in operands)
        key = op.attribute("kind"), self._text(op.called[0]), _shape(op.shape), given
        if key not in self._meanings.fusions:
            self._meanings.fusions[key] = self._inside(op, given)
        self._fusions[op.name] = inside = self._meanings.fusions[key]
        self.computed.update(inside.made)
        return inside.results

    def _text(self, name: str) -> int:
        """A computation with all that it calls, letter by letter, but for its own name and stack frames."""
        if name not in self._texts:
            text = self._meanings.without_frames(self._module.texts[name])
            self._texts[name] = self._meanings.of(("text", text, *map(self._text, _CALLED.findall(text))))
        return self._texts[name]

    def _inside(self, op: Instruction, operands: Sequence[Sequence[Meaning]]) -> _Inside:
        body, inner = self._module[op.called[0]], dict[str, list[Meaning]]()
        readers: dict[Meaning, set[Meaning]] = {}
        for one in body.ops.values():
            given = [inner[name] for name in one.operands]
            if one.opcode == "parameter":
                made = list(operands[int(one.attributes)])
            elif one.opcode == "bitcast":
                made = [self._meanings.view(str(one.shape), given[0][0], str(body.ops[one.operands[0]].shape))]
            elif one.opcode == "get-tuple-element":
                made = [given[0][one.index]]
            elif one.opcode == "tuple":
                made = [meaning for part in given for meaning in part]
            else:
                emitter = op.attribute("kind") if one.opcode in _ORDERED else ""
                number = self._meanings.of((*self._said(one), emitter, *(tuple(part) for part in given)))
                made = [(number, leaf) for leaf in range(len(one.result))]
            inner[one.name] = made
        _require(_shape(op.shape) == _shape(body.root.shape), f"has another shape in {op.name} than what it calls")
        for number, parameter in body.parameters.items():
            todo = [parameter]
            while todo:
                for user, _ in body.uses[todo.pop().name]:
                    if user.opcode in ("bitcast", "tuple", "get-tuple-element"):
                        todo.append(user)
                    else:
                        for given in operands[number]:
                            readers.setdefault(given, set()).update(inner[user.name])
        return _Inside(inner[body.root.name], {meaning for made in inner.values() for meaning in made}, readers)

    def _keep_pair(self, op: Instruction, places: list[Place], position: int) -> None:
        """What an asynchronous pair reads is read until its end, what it makes is written from its beginning on."""
        if op.opcode.endswith("-start"):
            self._held[op.name] = places
        elif op.opcode.endswith("-done"):
            self._made[op.name] = self._made[op.operands[0]]
            for place in self._held.get(op.operands[0], ()):
                self._note(place, position, op.name)

    def _note(self, place: Place, position: int, reader: str) -> None:
        self._reads.setdefault(self._version(place), []).append((position, reader))

    def _said(self, op: Instruction) -> tuple[object, ...]:
        """What an instruction says of itself, called computations by what they say."""
        if op.opcode == "while":
            called = self._looped(op.attribute("condition"), False), self._looped(op.attribute("body"), True)
        else:
            called = tuple(map(self._spelled, op.called)) if "=%" in op.attributes or "{%" in op.attributes else ()
        return op.opcode, _shape(op.shape), _stated(op.attributes), called

    def _looped(self, name: str, carries: bool) -> int:
        """A loop's condition, or its body, whose results are written over what it is given."""
        body = self._module[name.lstrip("%")]
        given = body.parameters[0]
        over = {number: Place(given.name, number) for number in range(len(given.result))} if carries else {}
        self.loops.append(_Reading(self._module, body, self._meanings, over))
        return self.loops[-1].meaning

    def _spelled(self, name: str) -> int:
        """A computation as it stands, whatever the names in it."""
        if name not in self._bodies:
            body = self._module[name]
            number = {op: f"%{i}" for i, op in enumerate(body.ops)}
            lines = []
            for op in body.ops.values():
                called = tuple(self._spelled(one) for one in op.called)
                operands = tuple(number[operand] for operand in op.operands)
                lines.append((op.opcode, _shape(op.shape), operands, _stated(op.attributes), called, op.root))
            self._bodies[name] = self._meanings.of(("body", *lines))
        return self._bodies[name]

    def _updates(self, op: Instruction, operands: Sequence[Tree]) -> Iterator[tuple[int | None, Place]]:
        """(leaf, buffer): what it overwrites, and the leaf of its result that lies there then, where that is known."""
        if op.opcode == "fusion":
            text = self._text(op.called[0])
            if text not in self._meanings.updates:
                self._meanings.updates[text] = list(_updated_parameters(self._module[op.called[0]]))
            for leaf, number in self._meanings.updates[text]:
                yield from ((leaf, place) for place in _places(operands[number]))
        elif op.opcode == "while":
            handed_on = _handed_on(self._module[op.attribute("body").lstrip("%")])
            for number, place in enumerate(_places(operands[0])):
                if number in handed_on:
                    self._views[Place(op.name, number)] = self._version(place)
                else:
                    yield number, place
        elif op.opcode == "conditional":
            for name, tree in zip(op.called, operands[1:], strict=True):
                yield from ((None, place) for place in self._overwritten_in(name, [tree]))
        elif op.opcode == "call":
            yield from ((None, place) for place in self._overwritten_in(op.called[0], operands))
        else:
            for leaf, position in _updated_operands(op):
                yield from ((leaf, place) for place in _places(operands[position]))

    def _overwritten_in(self, name: str, given: Sequence[Tree]) -> Iterator[Place]:
        """Of what a computation is given, the buffers that it overwrites."""
        body = self._module[name]
        inner: dict[Place, Place] = {}
        trees: dict[str, Tree] = {}
        for op in body.ops.values():
            operands = [trees[operand] for operand in op.operands]
            if op.opcode == "parameter":
                tree = _tree(op.name, op.shape)
                inner.update(zip(_places(tree), _places(given[int(op.attributes)]), strict=True))
            elif op.opcode in ("bitcast", "opt-barrier"):
                (tree,) = operands
            elif op.opcode == "get-tuple-element":
                (parts,) = operands
                assert not isinstance(parts, Place)
                tree = parts[op.index]
            elif op.opcode == "tuple":
                tree = tuple(operands)
            else:
                tree = _tree(op.name, op.shape)
                yield from (inner[place] for _, place in self._updates(op, operands) if place in inner)
            trees[op.name] = tree

    def _end(self, outputs: Sequence[Place], over: Mapping[int, Place]) -> None:
        """Outputs overwrite arguments when their buffer is first written; whatever lives to the end is read there."""
        _require(not self._copies, f"never waits for {', '.join(self._copies)}")
        for output, argument in over.items():
            first = self._buffer(outputs[output])
            if first != argument:
                self._overwritten.append((first.maker, argument, self._made[first.maker]))
        for place in outputs:
            self._note(place, len(self._made), "the end")

    def reads_of_overwritten(self) -> dict[Meaning, set[Meaning]]:
        """Of what fusions overwrite, what is made of it in them: a fusion's threads do so in no order."""
        found: dict[Meaning, set[Meaning]] = {}
        versions = self._by_buffer()
        for writer, place, since in self._overwritten:
            if (inside := self._fusions.get(writer)) is None:
                continue
            for version in versions.get(self._buffer(place), ()):
                if self._made[version.maker] < since:
                    meaning = self._means[version]
                    found.setdefault(meaning, set()).update(inside.readers.get(meaning, ()))
        return found

    def _by_buffer(self) -> dict[Place, list[Place]]:
        """Versions that are read, by the first one in the same buffer."""
        versions: dict[Place, list[Place]] = {}
        for version in self._reads:
            versions.setdefault(self._buffer(version), []).append(version)
        return versions

    def late_reads(self) -> dict[tuple[int, Meaning], dict[int, str]]:
        """Of every overwriting and every version that is gone then: who reads it later, by expression."""
        versions = self._by_buffer()
        found: dict[tuple[int, Meaning], dict[int, str]] = {}
        for writer, place, since in self._overwritten:
            for version in versions.get(self._buffer(place), ()):
                if self._made[version.maker] >= since:
                    continue
                late = found.setdefault((self.expressions.get(writer, -2), self._means[version]), {})
                for position, reader in self._reads[version]:
                    if position > since:
                        late[self.expressions.get(reader, -3)] = reader
        return found


def _donated(module: Module) -> dict[int, Place]:
    arguments = {number: Place(op.name, 0) for number, op in module.entry.parameters.items()}
    return {output: arguments[argument] for output, argument in module.aliases.items()}


@functools.lru_cache(maxsize=1 << 16)  # two modules say nearly the same things
def _stated(attributes: str) -> str:
    """Attributes without names, streams and what only tells of origins."""
    return _NAMES.sub("%", _QUEUE.sub("", _ORIGIN.sub("", attributes))) if attributes else ""


@functools.lru_cache(maxsize=1 << 12)
def _shape(shape: Shape) -> str:
    return str(shape) if isinstance(shape, Array) else ",".join(map(str, leaves(shape)))


def _tree(name: str, shape: Shape) -> Tree:
    numbers = iter(range(10**6))

    def made(part: Shape) -> Tree:
        return Place(name, next(numbers)) if isinstance(part, Array) else tuple(made(one) for one in part)

    return made(shape)


def _places(tree: Tree) -> Iterator[Place]:
    if isinstance(tree, Place):
        yield tree
    else:
        for part in tree:
            yield from _places(part)


def _one(tree: Tree, op: Instruction) -> Place:
    _require(isinstance(tree, Place), f"{op.name} takes a tuple for an array")
    assert isinstance(tree, Place)
    return tree


def _updated_operands(op: Instruction) -> list[tuple[int, int]]:
    """(leaf, position): the operands that an instruction updates in place, or a library adds to."""
    if op.opcode in _UPDATES:
        return [(0, 0)]
    found = _ADDED.search(op.attributes)
    return [(int(leaf or 0), int(position)) for leaf, position in _PAIR.findall(found[1])] if found else []


def _updated_parameters(fused: Computation) -> Iterator[tuple[int, int]]:
    """(leaf, number): the parameters whose updates a fusion returns."""
    for leaf, result in enumerate(fused.by_leaf):
        while result.opcode in ("bitcast", "get-tuple-element"):
            result = fused.ops[result.operands[0]]
        for _, position in _updated_operands(result):
            source = fused.behind_bitcasts(fused.ops[result.operands[position]])
            if source.opcode == "parameter":
                yield leaf, int(source.attributes)


def _handed_on(body: Computation) -> set[int]:
    """Leaves of a loop's state that its body returns as they were given."""
    found = set()
    for number, op in enumerate(body.results):
        source = body.ops[op.operands[0]] if op.opcode == "get-tuple-element" else None
        if source is not None and source.opcode == "parameter" and op.index == number:
            found.add(number)
    return found
