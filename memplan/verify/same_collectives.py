"""The verifier of shaped collectives: is a module the plain one, with collectives replaced by equal compositions?

It shares no code with the writers. Both modules are read into numbered values, equal for equal values: an instruction's
value is its text and its operands' values, but collectives, and what moves and cuts their pieces, are looked through
(see `movements`). A value is then what each device holds: pieces of sources, each summed over some devices.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memplan.verify.dataflow import require
from memplan.verify.movements import COLLECTIVE, Movements, is_row_major
from memplan.verify.spreads import Operation, Spread, Spreads
from memplan.xla.module import BLOCKS, NAME, Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape

Tree = int | tuple["Tree", ...]

_NOT_SAID = re.compile(  # where it comes from, and what it waits for
    r',? ?(?:metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}|control-predecessors=\{[^}]*\})'
)
_BEFORE = re.compile(r"control-predecessors=\{([^}]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_ACTS = re.compile(r"^(?:infeed|outfeed|send|recv|send-done|recv-done|rng|rng-get-and-update-state)$")
_SCHEDULED = re.compile(r", is_scheduled=true")
_FREE = frozenset({"constant", "parameter", "tuple", "get-tuple-element", "opt-barrier"})


@dataclass(frozen=True)
class Body:
    """What a computation does with its arguments."""

    shape: str  # of its result
    outputs: tuple[int, ...]
    effects: tuple[int, ...] = ()  # in order

    def number(self, spreads: Spreads) -> int:
        return spreads.number(("computation", self.shape, self.outputs, self.effects), 0, 0)


Where = tuple[str, str]  # names of a computation and of an instruction in it


def judge_shaped(plain: Module, shaped: Module, partitions: int, wire: str | None = None) -> None:
    """Accept a module with other collectives.

    Args:
      wire: the type in which float32 sums over several devices may be sent for one more sum.

    Raises:
      NotThePlainModuleError: it computes something else; names the instruction.
    """
    require(_options(plain) == _options(shaped), "has other options, arguments or aliases")
    _judge_channels(plain, shaped)
    spreads = Spreads(partitions)
    first, second = ModuleValues(plain, spreads, None), ModuleValues(shaped, spreads, wire)
    one, other = first.body(plain.entry_name, True), second.body(shaped.entry_name, True)
    more = Counter(second.stated.values()) - Counter(first.stated.values())
    names = [name for (_, name), value in second.stated.items() if value in more]
    require(not more, f"computes by {_changed(first, second, names)} what the plain module does not")
    require(one.effects == other.effects, "has other effects, or in another order")
    require(one == other, f"returns other values, {_changed(first, second, [shaped.entry.root.name])} among them")
    require(not first.barriers - second.barriers, "lacks an optimization barrier")
    waits = Counter(first.waits.values()) - Counter(second.waits.values())
    late = [name for (_, name, _), wait in first.waits.items() if wait in waits]
    require(not late, f"does not wait in {', '.join(late)} for what the plain module waits for")
    idle = Counter(second.idle.values()) - Counter(first.idle.values())
    names = [name for (_, name), collective in second.idle.items() if collective in idle]
    require(not names, f"has collectives that nobody reads: {', '.join(names)}")


class ModuleValues:
    """The values of a module.

    Attributes:
      values: of the leaves of every instruction.
      stated: instructions that are not looked through, and their values.
      barriers: what optimization barriers hold.
      waits: instructions, their predecessors by control, and the values of both.
      idle: collectives that nobody reads.
    """

    def __init__(self, module: Module, spreads: Spreads, wire: str | None) -> None:
        self._module, self._spreads = module, spreads
        self._movements = Movements(module, spreads, wire)
        self._bodies: dict[str, Body] = {}
        self.values: dict[Where, tuple[int, ...]] = {}
        self.stated: dict[Where, int] = {}
        self.barriers: Counter[tuple[int, ...]] = Counter()
        self.waits: dict[tuple[str, str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.idle: dict[Where, tuple[str, str, tuple[int, ...]]] = {}

    def body(self, name: str, block: bool) -> Body:
        """A computation; a block runs instruction by instruction, as the entry does."""
        if name not in self._bodies:
            self._bodies[name] = self._read(self._module[name], block)
        return self._bodies[name]

    def _read(self, body: Computation, block: bool) -> Body:
        trees: dict[str, Tree] = {}
        effects: list[int] = []
        acting: set[str] = set()
        for op in body.ops.values():
            for operand in op.operands:
                require(operand in trees, f"reads {operand} in {op.name} before it is made")
            before = len(effects)
            trees[op.name] = self._tree(body, op, [trees[operand] for operand in op.operands], effects, block)
            if len(effects) > before:
                acting.add(op.name)
            if block:
                self.values[body.name, op.name] = self._exact(trees[op.name])
        if block:
            self._note_waits(body)
            self._note_idle(body, acting)
        return Body(shape_said(body.root.shape), self._exact(trees[body.root.name]), tuple(effects))

    def _tree(self, body: Computation, op: Instruction, given: list[Tree], effects: list[int], block: bool) -> Tree:
        if op.opcode == "parameter":
            return self._argument(op)
        if op.opcode == "tuple":
            return tuple(given)
        if op.opcode == "get-tuple-element":
            (parts,) = given
            require(not isinstance(parts, int), f"takes an element of what is no tuple in {op.name}")
            assert not isinstance(parts, int)
            return parts[op.index]
        if op.opcode == "opt-barrier":
            self.barriers[self._exact(given[0])] += 1
            return given[0]
        if op.opcode == "while":
            return self._while(body, op, given, effects, block)

        def stated(counted: bool) -> tuple[int, ...]:
            called = [self.body(name, block and op.opcode in BLOCKS) for name in op.called]
            number = self._number(body, op, given, called, effects)
            if block and counted and op.opcode not in _FREE:
                self.stated[body.name, op.name] = number
            return self._leaves(op, number)

        if not all(isinstance(one, int) for one in given):
            return _shaped_as(op.shape, iter(stated(True)))
        values = [one for one in given if isinstance(one, int)]
        shapes = [array for name in op.operands for array in body.ops[name].result]
        return _shaped_as(op.shape, iter(self._movements.of(op, values, shapes, stated)))

    def _argument(self, op: Instruction) -> Tree:
        arguments = (
            self._spreads.argument(("argument", op.attributes, leaf, shape_said(array)), array.size)
            for leaf, array in enumerate(op.result)
        )
        return _shaped_as(op.shape, arguments)

    def _number(
        self, body: Computation, op: Instruction, given: Sequence[Tree], called: Sequence[Body], effects: list[int]
    ) -> int:
        """The number of an instruction that is not looked through."""
        said = op.attributes if op.opcode == "constant" else _said(op.attributes)
        if op.opcode == "constant" and "{...}" in said:  # which one is not told
            said += op.name
        acts = bool(_EFFECT.search(said) or _ACTS.match(op.opcode) or any(one.effects for one in called))
        if acts:  # equal ones do not have equal results
            said += f" effect {len(effects)}"
        operands = tuple(
            (shape_said(body.ops[name].shape), self._exact(tree)) for name, tree in zip(op.operands, given, strict=True)
        )
        numbers = tuple(one.number(self._spreads) for one in called)
        made = Operation(op.opcode, shape_said(op.shape), said, numbers, operands)
        number = self._spreads.number(made, sum(array.size for array in op.result), self._arguments(made))
        if acts:
            effects.append(number)
        return number

    def _arguments(self, made: Operation) -> int:
        values = (value for _, values in made.operands for value in values)
        return functools.reduce(lambda found, value: found | self._spreads.arguments[value], values, 0)

    def _leaves(self, op: Instruction, number: int) -> tuple[int, ...]:
        if isinstance(op.shape, Array):
            return (number,)
        arguments = self._spreads.arguments[number]
        return tuple(
            self._spreads.number(("leaf", number, leaf), array.size, arguments) for leaf, array in enumerate(op.result)
        )

    def _exact(self, tree: Tree) -> tuple[int, ...]:
        return tuple(self._spreads.exact(value) for value in _flat(tree))

    # loops

    def _while(
        self, body: Computation, op: Instruction, given: Sequence[Tree], effects: list[int], block: bool
    ) -> Tree:
        """A loop; a sum over devices that its body only adds to a carry is the sum of what the loop adds up."""
        condition, inner = (self.body(op.attribute(name).lstrip("%"), block) for name in ("condition", "body"))
        sums = self._sums(op, condition, inner, self._exact(given[0]))
        outputs = list(inner.outputs)
        for carry, (added, _) in sums.items():
            outputs[carry] = added
            if block:
                name = op.attribute("body").lstrip("%")
                self.stated[name, self._module[name].results[carry].name] = added
        number = self._number(body, op, given, [condition, replace(inner, outputs=tuple(outputs))], effects)
        if block:
            self.stated[body.name, op.name] = number
        found = list(self._leaves(op, number))
        for carry, (_, spread) in sums.items():
            found[carry] = self._spreads.value(self._spreads.with_source(spread, found[carry]))
        return _shaped_as(op.shape, iter(found))

    def _sums(
        self, op: Instruction, condition: Body, inner: Body, start: Sequence[int]
    ) -> dict[int, tuple[int, Spread]]:
        """Carries that only add up sums over devices: what is carried without those sums, and over which devices."""
        computation = self._module[op.attribute("body").lstrip("%")]
        if len(computation.results) != len(inner.outputs) or len(start) != len(inner.outputs):
            return {}
        arguments = list(_flat(self._argument(computation.parameters[0])))
        everything = (*condition.outputs, *condition.effects, *inner.effects)
        found: dict[int, tuple[int, Spread]] = {}
        for carry, output in enumerate(inner.outputs):
            others = (*everything, *(one for number, one in enumerate(inner.outputs) if number != carry))
            bit = self._spreads.arguments[arguments[carry]]
            if self._movements.is_zero(start[carry]) and not any(self._spreads.arguments[one] & bit for one in others):
                summed = self._summed(output, arguments[carry])
                if summed is not None:
                    found[carry] = summed
        return found

    def _summed(self, output: int, argument: int) -> tuple[int, Spread] | None:
        """Of a carry and a sum over devices: the carry and what is summed there, and over which devices."""
        made = self._spreads.keys[output]
        if not isinstance(made, Operation) or made.opcode != "add":
            return None
        places = [place for place, (_, values) in enumerate(made.operands) if values != (argument,)]
        if len(places) != 1:
            return None
        (place,) = places
        shape, (term,) = made.operands[place]
        spread = self._spreads.spread(term)
        source = self._spreads.whole(spread)
        if source is None or source == term or self._spreads.arguments[term] & self._spreads.arguments[argument]:
            return None
        operands = [*made.operands]
        operands[place] = shape, (source,)
        added = made._replace(operands=tuple(operands))
        return self._spreads.number(added, self._spreads.sizes[output], self._spreads.arguments[output]), spread

    # beside the values

    def _note_waits(self, body: Computation) -> None:
        for op in body.ops.values():
            found = _BEFORE.search(op.attributes)
            for name in NAME.findall(found[1]) if found else ():
                self.waits[body.name, op.name, name] = self.values[body.name, op.name], self.values[body.name, name]

    def _note_idle(self, body: Computation, acting: set[str]) -> None:
        read = {body.root.name, *acting}
        for op in reversed(list(body.ops.values())):
            if op.name in read:
                read.update(op.operands)
            elif COLLECTIVE.match(op.opcode):
                operands = tuple(value for name in op.operands for value in self.values[body.name, name])
                self.idle[body.name, op.name] = op.opcode, _said(op.attributes), operands


def _options(module: Module) -> str:
    return _SCHEDULED.sub("", module.head.partition("\n")[0])


def _judge_channels(plain: Module, shaped: Module) -> None:
    """Two collectives may share a channel only where those of the plain module do."""
    known = _by_channel(plain)
    for channel, ops in _by_channel(shaped).items():
        same = Counter(map(_talk, ops)) == Counter(map(_talk, known.get(channel, ())))
        require(len(ops) == 1 or same, f"has one channel for {', '.join(op.name for op in ops)}")


def _by_channel(module: Module) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for op in module.instructions.values():
        if channel := _CHANNEL.search(op.attributes):
            found.setdefault(channel[1], []).append(op)
    return found


def _talk(op: Instruction) -> tuple[str, str]:
    return op.opcode, _said(op.attributes)


def _changed(first: ModuleValues, second: ModuleValues, otherwise: Sequence[str]) -> str:
    """The first instruction that has other values than the plain module's of its name."""
    changed = (where for where, values in second.values.items() if first.values.get(where, values) != values)
    return next((name for _, name in changed), ", ".join(otherwise[:1]))


@functools.lru_cache(maxsize=1 << 14)
def _said(attributes: str) -> str:
    """Attributes without names, origins and the numbers of channels."""
    return NAME.sub("%", _CHANNEL.sub("channel_id", _NOT_SAID.sub("", attributes))).strip(", ") if attributes else ""


@functools.lru_cache(maxsize=1 << 12)
def shape_said(shape: Shape) -> str:
    """A shape, with the layouts that are not row-major."""
    if isinstance(shape, Array):
        return str(Array(shape.dtype, shape.dims) if is_row_major(shape) else shape)
    return f"({', '.join(map(shape_said, shape))})"


def _shaped_as(shape: Shape, values: Iterator[int]) -> Tree:
    """The values of a shape's leaves, in its tuples."""
    return next(values) if isinstance(shape, Array) else tuple(_shaped_as(part, values) for part in shape)


def _flat(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for part in tree:
            yield from _flat(part)
