"""The meanings of values of two modules: numbered expressions, equal for equal values.

Fusions are looked through: an instruction has the same meaning in whichever fusion it is computed.
"""

import functools
import itertools
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape

Meaning = tuple[int, int]  # number of an expression, leaf

# Fields of a kernel's configuration: on which queue it runs does not change what it computes.
_QUEUES = ("operation_queue_id", "wait_on_operation_queues")
_STREAM = "_xla_stream_annotation"  # a frontend attribute; nor does the stream
# A fusion of only a slice means the same in XLA's kernels and in its emitter of dynamic slices.
_EMITTER = "fusion_backend_config"
_SLICE_EMITTER = {
    "kind": "__custom_fusion",
    "custom_fusion_config": {"name": "dynamic_slice_fusion"},
}
_ORDERED = frozenset(
    "reduce reduce-window scatter select-and-scatter dot convolution sort".split()  # noqa: SIM905
)  # the emitter decides in which order they add
_NAMING = ("bitcast", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class FusionMeanings:
    """The meanings of a fusion.

    Attributes:
      results: of its results, leaf by leaf.
      computed: of all values inside it.
      readers: of each operand: the meanings of the instructions inside that read it.
    """

    results: list[Meaning]
    computed: set[Meaning]
    readers: dict[Meaning, set[Meaning]]


class Stated(NamedTuple):
    """What an instruction computes from its operands: equal for equal functions of operands."""

    opcode: str
    shapes: tuple[Array, ...]
    statement: Hashable
    kind: str  # of a fusion
    configuration: str  # of the back end
    frontend_attributes: Hashable
    channel: int | None  # of a collective
    called: tuple[int, ...]  # computations, by their structure or meaning


@dataclass
class Expressions:
    """Expressions of both modules."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    # views -> their origin, and its shape
    origins: dict[Meaning, tuple[Meaning, Shape]] = field(default_factory=dict)
    structures: dict[Hashable, int] = field(default_factory=dict)
    fusions: dict[Hashable, FusionMeanings] = field(default_factory=dict)

    _identities: dict[tuple[int, ...], int] = field(default_factory=dict)
    _bodies: dict[int, Computation] = field(default_factory=dict)  # kept, so that no id is reused

    def identity(self, body: Computation) -> int:
        """Equal for the same instructions: modules share those that an edit has not changed."""
        key = id(body.root), *map(id, body.ops.values())
        number = self._identities.setdefault(key, len(self._identities))
        self._bodies.setdefault(number, body)
        return number

    def number(self, expression: Hashable) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))

    def view(self, shape: Shape, source: Meaning, source_shape: Shape) -> Meaning:
        """The same bytes in another shape; a view of a view is a view of the origin."""
        origin, original = self.origins.get(source, (source, source_shape))
        if shape == original:
            return origin
        meaning = self.number(("view", shape, origin)), 0
        self.origins[meaning] = origin, original
        return meaning


class ModuleExpressions:
    """Expressions of the instructions and computations of one module."""

    def __init__(self, module: Module, expressions: Expressions) -> None:
        self.all = expressions
        self._module = module
        self._structures: dict[str, int] = {}
        self._called: dict[str, tuple[int, ...]] = {}

    def stated(self, op: Instruction, called: Sequence[int]) -> Stated:
        """An instruction without its operands; `called` are the computations that it calls."""
        kind = op.kind if op.opcode.startswith("fusion") else ""
        configuration = op.backend_config
        if configuration:
            is_slice, configuration = _configuration(configuration)
            if is_slice and kind == "kCustom":
                kind = "kLoop"
        return Stated(
            op.opcode,
            op.result,
            op.statement,
            kind,
            configuration,
            _frontend(op.frontend_attributes),
            op.channel,
            tuple(called),
        )

    def called(self, op: Instruction) -> tuple[int, ...]:
        """The structures of the computations that an instruction calls."""
        return tuple(map(self.structure, op.called)) if op.called else ()

    def structure(self, name: str) -> int:
        """The number of a computation's instructions in order, whatever their names.

        Copies of a value are left out; operands are positions.
        """
        if name not in self._structures:
            body = self._module[name]
            key = self.all.identity(body), self._callees(name)
            if key not in self.all.structures:
                self.all.structures[key] = self._structure(body)
            self._structures[name] = self.all.structures[key]
        return self._structures[name]

    def _callees(self, name: str) -> tuple[int, ...]:
        """The structures of all computations that a computation calls."""
        if name not in self._called:
            called = [op.called for op in self._module[name].ops.values() if op.called]
            names = itertools.chain.from_iterable(called)
            self._called[name] = tuple(map(self.structure, names))
        return self._called[name]

    def _structure(self, body: Computation) -> int:
        positions: dict[str, int] = {}
        lines: list[Hashable] = []
        for op in body.ops.values():
            operands = tuple(positions[operand] for operand in op.operands)
            if is_copy(op, body):
                (positions[op.name],) = operands
                continue
            positions[op.name] = len(lines)
            lines.append((self.stated(op, self.called(op)), operands))
        return self.all.number(("structure", *lines, positions[body.root.name]))

    def fusion(self, op: Instruction, operands: tuple[tuple[Meaning, ...], ...]) -> FusionMeanings:
        """A fusion by its instructions and, if an order matters, its emitter."""
        (name,) = op.called
        body = self._module[name]
        key = op.kind, self.all.identity(body), self._callees(name), operands
        if key not in self.all.fusions:
            self.all.fusions[key] = self._fusion(op.kind, body, operands)
        return self.all.fusions[key]

    def _fusion(
        self,
        kind: str,
        body: Computation,
        operands: Sequence[Sequence[Meaning]],
    ) -> FusionMeanings:
        inner: dict[str, list[Meaning]] = {}
        for op in body.ops.values():
            sources = [inner[name] for name in op.operands]
            if op.opcode == "parameter":
                meanings = list(operands[op.parameter_number])
            elif op.opcode == "bitcast":
                source_shape = body.ops[op.operands[0]].shape
                meanings = [self.all.view(op.shape, sources[0][0], source_shape)]
            elif op.opcode == "get-tuple-element":
                meanings = [sources[0][op.index]]
            elif is_copy(op, body):
                meanings = sources[0]
            elif op.opcode == "tuple":
                meanings = [meaning for source in sources for meaning in source]
            else:
                emitter = kind if op.opcode in _ORDERED else ""
                stated = self.stated(op, self.called(op))
                number = self.all.number((stated, emitter, *map(tuple, sources)))
                meanings = [(number, leaf) for leaf in range(len(op.result))]
            inner[op.name] = meanings
        computed = {meaning for meanings in inner.values() for meaning in meanings}
        return FusionMeanings(inner[body.root.name], computed, _readers(body, inner, operands))


def _readers(
    body: Computation, inner: dict[str, list[Meaning]], operands: Sequence[Sequence[Meaning]]
) -> dict[Meaning, set[Meaning]]:
    """For each operand of a fusion: results of the instructions that read it, or a view of it."""
    readers: dict[Meaning, set[Meaning]] = {}
    for number, parameter in body.parameters.items():
        names = [parameter.name]
        while names:
            for user, _ in body.uses[names.pop()]:
                if user.opcode in _NAMING:
                    names.append(user.name)
                    continue
                for operand in operands[number]:
                    readers.setdefault(operand, set()).update(inner[user.name])
    return readers


@functools.lru_cache(maxsize=1 << 16)  # the configurations of two modules are nearly the same
def _configuration(text: str) -> tuple[bool, str]:
    """Is a configuration that of the emitter of slices? And the rest of it, without queues."""
    try:
        fields = json.loads(text)
    except ValueError:
        return False, text
    if not isinstance(fields, dict):
        return False, text
    for name in _QUEUES:
        fields.pop(name, None)
    if fields.get(_EMITTER) != _SLICE_EMITTER:
        return False, json.dumps(fields)
    del fields[_EMITTER]
    return True, json.dumps(fields) if fields else ""


def _frontend(attributes: Mapping[str, str]) -> Hashable:
    """Frontend attributes; the stream alone says nothing."""
    if not attributes or attributes.keys() == {_STREAM}:
        return ()
    return tuple(sorted(attributes.items()))


def is_library(fusion: Instruction) -> bool:
    """Does the fusion's emitter, rather than its instructions, define its result?"""
    return fusion.kind == "kCustom" and not _configuration(fusion.backend_config)[0]


def is_copy(op: Instruction, body: Computation) -> bool:
    """Does an instruction copy a value within its computation, without change of layout?"""
    return op.opcode == "copy" and op.shape == body.ops[op.operands[0]].shape
