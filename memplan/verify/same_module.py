"""The judge of plans: is a planned module the plain one, with clones, copies to the host and another order?

It shares nothing with what plans and writes. Every value of the planned module is named by what it is computed from,
clones and copies looked through, and must be one of the plain module's; the outputs must be the same ones. Buffers are
not in that form: what was overwritten in place, be it a donated argument, what is updated or what a loop carries, may
be read no more, but by what reads it there in the plain module too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
_QUEUE = re.compile(r'"(?:operation_queue_id|wait_on_operation_queues)":(?:"[^"]*"|\[[^\]]*\]),?')
_ORIGIN = re.compile(r",? ?(?:metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^}]*\})*\}|control-predecessors=\{[^}]*\})")
_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_ONCE = re.compile(
    r"^(?:infeed|outfeed|send|recv|rng.*|(?:all|reduce|collective)-.*|while|conditional|call|after-all|add-dependency)$"
)
_ADDED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")
_POSITION = re.compile(r"\((\d+), \{\}\)")
_UPDATES = ("dynamic-update-slice", "scatter")


class NotThePlainModuleError(MemplanError):
    """A planned module is not the plain one, or reads what is no longer there. Always a bug of memplan's."""


def judge(plain: Module, planned: Module) -> None:
    """Accept a planned module.

    Raises:
      NotThePlainModuleError: it computes something else, with the instruction.
    """
    meanings = _Meanings()
    first, second = _Reading(plain, meanings), _Reading(planned, meanings)
    _require(plain.aliases == planned.aliases, "donates other arguments")
    computed = set(first.expressions.values())
    for name, expression in second.expressions.items():
        _require(expression in computed, f"{name} is computed by nothing in the plain module")
    _require(first.outputs == second.outputs, "returns other values")
    _require(first.effects == second.effects, "has other effects, or in another order")
    missing = Counter(first.single) - Counter(second.single)
    _require(not missing, "lacks what must run")
    more = Counter(second.single) - Counter(first.single)
    _require(not more, "runs again what updates in place or has effects")
    allowed = first.late_reads()
    for overwriting, readers in second.late_reads().items():
        known = allowed.get(overwriting, {})
        wrong = {expression: name for expression, name in readers.items() if expression not in known}
        _require(not wrong, f"{', '.join(wrong.values())} reads what was overwritten before")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotThePlainModuleError(
            f"The planned module {what}. That is a bug of memplan's; nothing was run. Please report it."
        )


@dataclass
class _Meanings:
    """Expressions by number: the same for the same, in both modules."""

    numbers: dict[object, int] = field(default_factory=dict)

    def of(self, expression: object) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))


class _Reading:
    """One module: what every value means, and who reads which buffer after it was overwritten."""

    def __init__(self, module: Module, meanings: _Meanings) -> None:
        self._module, self._meanings = module, meanings
        self._bodies: dict[str, int] = {}
        self._trees: dict[str, Tree] = {}
        self._means: dict[Place, Meaning] = {}
        self._reads: dict[Place, list[tuple[int, str]]] = {}  # position and reader
        self._position: dict[str, int] = {}
        self._aliases: dict[Place, Place] = {}  # views -> the buffer that they name
        self.expressions: dict[str, int] = {}
        self.effects: list[int] = []
        self.single: list[int] = []
        self._overwritten: list[tuple[str, Place]] = []
        self._under_way: dict[str, str] = {}
        for position, op in enumerate(module.entry.ops.values()):
            self._position[op.name] = position
            self._read(op, position)
        root = self._trees[module.entry.root.name]
        places = list(_places(root))
        self.outputs = [self._means[place] for place in places]
        self._end(places)

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
            _require(not isinstance(parts, Place), f"{op.name} takes an element of what is no tuple")
            assert not isinstance(parts, Place)
            self._trees[op.name] = parts[op.index]
        elif op.opcode == "tuple":
            self._trees[op.name] = tuple(operands)
        elif op.opcode == "copy-start":
            self._copy(op, operands[0])
        elif op.opcode == "copy-done":
            self._copied(op, position)
        else:
            self._kernel(op, operands, position)

    def _view(self, op: Instruction, place: Place) -> None:
        """A name for a buffer that may have another shape: the reader's expression says which."""
        expression = self._meanings.of(("view", str(op.shape), self._means[place]))
        alias = Place(op.name, 0)
        self._means[alias] = (expression, 0)
        self._aliases[alias] = self._storage(place)
        self._trees[op.name] = alias

    def _storage(self, place: Place) -> Place:
        return self._aliases.get(place, place)

    def _copy(self, op: Instruction, source: Tree) -> None:
        place = _one(source, op)
        self._trees[op.name] = (Place(op.name, 0), place, Place(op.name, 2))
        self._means[Place(op.name, 0)] = self._means[Place(op.name, 2)] = (-1, 0)  # not there yet: means nothing
        self._under_way[op.name] = ""

    def _copied(self, op: Instruction, position: int) -> None:
        """A copy is what it is a copy of; its source is read until here."""
        start = op.operands[0]
        _require(self._under_way.pop(start, None) is not None, f"ends {start} twice in {op.name}")
        _, source, _ = _places(self._trees[start])
        self._means[Place(op.name, 0)] = self._means[source]
        self._note(source, position, op.name)
        self._trees[op.name] = Place(op.name, 0)

    def _kernel(self, op: Instruction, operands: Sequence[Tree], position: int) -> None:
        places = [place for tree in operands for place in _places(tree)]
        for place in places:
            _require(self._means[place][0] != -1, f"{op.name} reads a copy that is under way")
            self._note(place, position, op.name)
        meaning = tuple(self._means[place] for place in places)
        expression = self._meanings.of((*self._said(op), meaning))
        self.expressions[op.name] = expression
        self._trees[op.name] = tree = _tree(op.name, op.shape)
        for number, place in enumerate(_places(tree)):
            self._means[place] = (expression, number)
        overwritten = list(self._updates(op, operands))
        self._overwritten += [(op.name, self._storage(place)) for place in overwritten]
        acts = bool(_EFFECT.search(op.attributes)) or bool(_ONCE.match(op.opcode)) or op.opcode.endswith("-start")
        if acts:
            self.effects.append(expression)
        if acts or overwritten:
            self.single.append(expression)

    def _note(self, place: Place, position: int, reader: str) -> None:
        self._reads.setdefault(self._storage(place), []).append((position, reader))

    def _said(self, op: Instruction) -> tuple[object, ...]:
        """What an instruction says of itself, called computations by what they say."""
        attributes = _QUEUE.sub("", _metadata_apart(op.attributes))
        called = tuple(self._body(name) for name in op.called)
        return op.opcode, _shape(op.shape), _NAMES.sub("%", attributes), called

    def _body(self, name: str) -> int:
        if name not in self._bodies:
            body = self._module[name]
            number = {op: f"%{i}" for i, op in enumerate(body.ops)}
            lines = []
            for op in body.ops.values():
                attributes = _NAMES.sub("%", _QUEUE.sub("", _metadata_apart(op.attributes)))
                called = tuple(self._body(one) for one in op.called)
                operands = tuple(number[operand] for operand in op.operands)
                lines.append((op.opcode, _shape(op.shape), operands, attributes, called, op.root))
            self._bodies[name] = self._meanings.of(("body", *lines))
        return self._bodies[name]

    def _updates(self, op: Instruction, operands: Sequence[Tree]) -> Iterator[Place]:
        """The buffers that an instruction overwrites, of those that it is given."""
        if op.opcode == "fusion":
            for number in _updated_parameters(self._module[op.called[0]]):
                yield from _places(operands[number])
        elif op.opcode == "while":
            handed_on = _handed_on(self._module[op.attribute("body").lstrip("%")])
            yield from (place for number, place in enumerate(_places(operands[0])) if number not in handed_on)
        elif op.opcode == "conditional":
            for name, tree in zip(op.called, operands[1:], strict=True):
                yield from self._overwritten_in(name, [tree])
        elif op.opcode == "call":
            yield from self._overwritten_in(op.called[0], operands)
        else:
            for position in _updated_operands(op):
                yield from _places(operands[position])

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
                yield from (inner[place] for place in self._updates(op, operands) if place in inner)
            trees[op.name] = tree

    def _end(self, outputs: Sequence[Place]) -> None:
        """Outputs overwrite the donated arguments when they are made; whatever lives to the end is read there."""
        _require(not self._under_way, f"never waits for {', '.join(self._under_way)}")
        arguments = {int(op.attributes): op.name for op in self._module.entry.parameters.values()}
        for output, argument in self._module.aliases.items():
            maker, given = self._storage(outputs[output]), arguments[argument]
            if maker.maker != given:
                self._overwritten.append((maker.maker, Place(given, 0)))
        for place in outputs:
            self._note(place, len(self._position), "the end")

    def late_reads(self) -> dict[tuple[int, Meaning], dict[int, str]]:
        """Of every overwriting and the value that is gone: who reads it later, by expression."""
        found: dict[tuple[int, Meaning], dict[int, str]] = {}
        for writer, place in self._overwritten:
            key = self.expressions.get(writer, -2), self._means[place]
            late = found.setdefault(key, {})
            for position, reader in self._reads.get(place, ()):
                if position > self._position[writer]:
                    late[self.expressions.get(reader, -3)] = reader
        return found


def _metadata_apart(attributes: str) -> str:
    """Attributes without what only tells of origins."""
    return _ORIGIN.sub("", attributes)


def _shape(shape: Shape) -> str:
    return ",".join(map(str, leaves(shape)))


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


def _updated_operands(op: Instruction) -> list[int]:
    """Positions of the operands that an instruction updates in place, or a library adds to."""
    if op.opcode in _UPDATES:
        return [0]
    found = _ADDED.search(op.attributes)
    return [int(position) for position in _POSITION.findall(found[1])] if found else []


def _updated_parameters(fused: Computation) -> Iterator[int]:
    """Numbers of the parameters whose updates a fusion returns."""
    for result in fused.results:
        while result.opcode in ("bitcast", "get-tuple-element"):
            result = fused.ops[result.operands[0]]
        for position in _updated_operands(result):
            source = fused.behind_bitcasts(fused.ops[result.operands[position]])
            if source.opcode == "parameter":
                yield int(source.attributes)


def _handed_on(body: Computation) -> set[int]:
    """Leaves of a loop's state that its body returns as they were given."""
    found = set()
    for number, op in enumerate(body.results):
        source = body.ops[op.operands[0]] if op.opcode == "get-tuple-element" else None
        if source is not None and source.opcode == "parameter" and op.index == number:
            found.add(number)
    return found
