"""The meanings of values of two modules: numbered expressions, equal for equal values; fusions are looked through."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape, leaves

Meaning = tuple[int, int]  # number of an expression, leaf

_NAMES = re.compile(r"%[\w.\-]+")
_CALLED = re.compile(r"(?:to_apply|calls)=%([\w.\-]+)")
_FRAME = re.compile(r" ?stack_frame_id=\d+")
_QUEUE = re.compile(r'"(?:operation_queue_id|wait_on_operation_queues)":(?:"[^"]*"|\[[^\]]*\]),?')
_ORIGIN = re.compile(r",? ?(?:metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^}]*\})*\}|control-predecessors=\{[^}]*\})")
_STREAM = re.compile(r',? ?frontend_attributes=\{_xla_stream_annotation="\d+"\}')
# A fusion of only a slice has the same meaning whether XLA's kernels or its emitter of dynamic slices run it.
_SLICE_EMITTER = re.compile(
    r'"fusion_backend_config":\{"kind":"__custom_fusion","custom_fusion_config":\{"name":"dynamic_slice_fusion"\}\},?'
)
_NO_CONFIG = re.compile(r",? ?backend_config=\{\}")
_ORDERED = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter", "dot", "convolution", "sort"})
_NAMING = ("bitcast", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class FusionMeanings:
    """A fusion: the meanings of its results, all values computed in it, and the uses of its operands."""

    results: list[Meaning]
    made: set[Meaning]
    readers: dict[Meaning, set[Meaning]]


@dataclass
class Expressions:
    """Expressions of both modules."""

    numbers: dict[object, int] = field(default_factory=dict)
    origins: dict[Meaning, tuple[Meaning, str]] = field(default_factory=dict)  # views -> their origin, and its shape
    fusions: dict[object, FusionMeanings] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)  # texts of computations without their names and stack frames

    def number(self, expression: object) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))

    def without_frames(self, text: str) -> str:
        if text not in self.bare:
            self.bare[text] = _FRAME.sub("", text.partition("\n")[2])
        return self.bare[text]

    def view(self, shape: str, given: Meaning, source_shape: str) -> Meaning:
        """The same bytes in another shape; a view of a view is a view of the origin."""
        origin, original = self.origins.get(given, (given, source_shape))
        if shape == original:
            return origin
        found = self.number(("view", shape, origin)), 0
        self.origins[found] = origin, original
        return found


class ModuleExpressions:
    """Expressions of the instructions and computations of one module, by their text."""

    def __init__(self, module: Module, expressions: Expressions) -> None:
        self.all, self._module = expressions, module
        self._bodies: dict[str, int] = {}
        self._texts: dict[str, int] = {}

    def stated(self, op: Instruction, called: Sequence[int]) -> tuple[object, ...]:
        """The text of an instruction without its operands."""
        return op.opcode, shapes_of(op.shape), _stated(op.attributes), tuple(called)

    def called(self, op: Instruction) -> tuple[int, ...]:
        """The computations that an instruction calls, by their text."""
        return tuple(map(self.body, op.called)) if "=%" in op.attributes or "{%" in op.attributes else ()

    def body(self, name: str) -> int:
        """A computation's text, independent of the names in it."""
        if name not in self._bodies:
            body, number, lines = self._module[name], dict[str, str](), list[object]()
            for op in body.ops.values():
                operands = tuple(number[operand] for operand in op.operands)
                if op.operands and is_same(op, body.ops[op.operands[0]]):
                    (number[op.name],) = operands
                    continue
                called = tuple(self.body(one) for one in op.called)
                number[op.name] = f"%{len(lines)}"
                lines.append((op.opcode, shapes_of(op.shape), operands, _stated(op.attributes), called))
            self._bodies[name] = self.all.number(("body", *lines, number[body.root.name]))
        return self._bodies[name]

    def text(self, name: str) -> int:
        """A computation with all that it calls, verbatim, without its own name and stack frames."""
        if name not in self._texts:
            text = self.all.without_frames(self._module.texts[name])
            self._texts[name] = self.all.number(("text", text, *map(self.text, _CALLED.findall(text))))
        return self._texts[name]

    def fusion(self, op: Instruction, operands: tuple[tuple[Meaning, ...], ...]) -> FusionMeanings:
        """A fusion by its instructions and, if an order matters, its emitter."""
        key = op.attribute("kind"), self.text(op.called[0]), shapes_of(op.shape), operands
        if key not in self.all.fusions:
            self.all.fusions[key] = self._fusion(op, operands)
        return self.all.fusions[key]

    def _fusion(self, op: Instruction, operands: Sequence[Sequence[Meaning]]) -> FusionMeanings:
        body, inner = self._module[op.called[0]], dict[str, list[Meaning]]()
        for one in body.ops.values():
            given = [inner[name] for name in one.operands]
            if one.opcode == "parameter":
                made = list(operands[int(one.attributes)])
            elif one.opcode == "bitcast":
                made = [self.all.view(str(one.shape), given[0][0], str(body.ops[one.operands[0]].shape))]
            elif one.opcode == "get-tuple-element":
                made = [given[0][one.index]]
            elif one.operands and is_same(one, body.ops[one.operands[0]]):
                made = given[0]
            elif one.opcode == "tuple":
                made = [meaning for part in given for meaning in part]
            else:
                emitter = op.attribute("kind") if one.opcode in _ORDERED else ""
                said = (*self.stated(one, self.called(one)), emitter, *(tuple(part) for part in given))
                number = self.all.number(said)
                made = [(number, leaf) for leaf in range(len(one.result))]
            inner[one.name] = made
        everything = {meaning for made in inner.values() for meaning in made}
        return FusionMeanings(inner[body.root.name], everything, _readers(body, inner, operands))


def _readers(
    body: Computation, inner: dict[str, list[Meaning]], operands: Sequence[Sequence[Meaning]]
) -> dict[Meaning, set[Meaning]]:
    """For each operand of a fusion: results of the instructions that read it, or a view of it."""
    readers: dict[Meaning, set[Meaning]] = {}
    for number, parameter in body.parameters.items():
        todo = [parameter]
        while todo:
            for user, _ in body.uses[todo.pop().name]:
                if user.opcode in _NAMING:
                    todo.append(user)
                else:
                    for given in operands[number]:
                        readers.setdefault(given, set()).update(inner[user.name])
    return readers


@functools.lru_cache(maxsize=1 << 16)  # the texts of two modules are nearly the same
def _stated(attributes: str) -> str:
    """Attributes without names, streams and origins."""
    if not attributes:
        return ""
    said = _STREAM.sub("", _QUEUE.sub("", _ORIGIN.sub("", attributes)))
    if _SLICE_EMITTER.search(said):
        said = _NO_CONFIG.sub("", _SLICE_EMITTER.sub("", said)).replace("kind=kCustom", "kind=kLoop", 1)
    return _NAMES.sub("%", said)


def is_library(fusion: Instruction) -> bool:
    """Does the fusion's emitter, rather than its instructions, define its result?"""
    return fusion.attribute("kind") == "kCustom" and not _SLICE_EMITTER.search(fusion.attributes)


def is_same(copy: Instruction, source: Instruction) -> bool:
    """A copy of a value within a computation, without change of layout."""
    return copy.opcode == "copy" and str(copy.shape) == str(source.shape)


@functools.lru_cache(maxsize=1 << 12)
def shapes_of(shape: Shape) -> str:
    """The shapes of all leaves, as written."""
    return str(shape) if isinstance(shape, Array) else ",".join(map(str, leaves(shape)))
