"""Text of a scheduled module -> computations and instructions, each parsed once, when it is asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypedDict, Unpack

from memplan.errors import MemplanError
from memplan.hardware.machine import Groups
from memplan.xla.large_literals import LARGE_NBYTES
from memplan.xla.replica_groups import groups_text, replica_groups
from memplan.xla.shapes import Array, Shape, bare, leaves, read_shape, shape_text

BLOCKS = frozenset({"call", "conditional", "while"})  # what they call runs kernel by kernel, as the entry does

_HEADER = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_LINE = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")  # root, name, shape, opcode, the rest
_CLOSED = re.compile(r"\)(?:, |$)")
METADATA = re.compile(r'\bmetadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
NAME = re.compile(r"%([\w.\-]+)")
_CONFIG = "backend_config={"
_BRACES = re.compile(r'[{}]|"(?:[^"\\]|\\.)*"')
_BRACKET_OR_COMMA = re.compile(r'[\[({})\]]|"(?:[^"\\]|\\.)*"|, ')
_TARGET = re.compile(r'custom_call_target="([^"]*)')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FRONTEND = re.compile(r"\bfrontend_attributes=\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_FRONTEND_PAIR = re.compile(r'([\w.\-]+)="((?:[^"\\]|\\.)*)"')
_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{\}\)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.MULTILINE)
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)\b", re.MULTILINE)
_STACK_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
    re.MULTILINE,
)
_INDEX = re.compile(r"\bindex=\d+")
_KIND = re.compile(r"\bkind=\w+")
_AFTER = re.compile(r",? ?control-predecessors=\{[^}]*\}")
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_RANGES = re.compile(r"\bslice=\{([^}]*)\}")
_RANGE = re.compile(r"\[([\d:]+)\]")
_SLICE_SIZES = re.compile(r"\bdynamic_slice_sizes=\{([\d,]*)\}")
_PADDING = re.compile(r"\bpadding=([\d_x\-]+)")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)')
_FILTER_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_DILATION = re.compile(r"\blhs_dilate=([\dx]+)")
_BATCH_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")
_FEATURE_GROUPS = re.compile(r"\bfeature_group_count=(\d+)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_IN_PLACE = re.compile(r",? ?output_to_operand_aliasing=\{.*?\}(?=, [a-z]|$)")
_SOURCES = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PREDECESSORS = re.compile(r"control-predecessors=\{([^}]*)\}")
_CONSTANT = re.compile(r"^.* = [a-z]\w*\[\d[^=]* constant\(.*$", re.MULTILINE)  # of an array
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|(?:true|false)_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_ALIAS = re.compile(r"\{(?P<output>[\d, ]*)\}: \((?P<argument>\d+), \{(?P<index>[\d, ]*)\}, (?:may|must)-alias\)")
_OF_THE_CALL = re.compile(  # the module's name, and where jax left arguments and results to XLA's partitioner
    r'fingerprint_before_lhs="[^"]*"|, allow_spmd_sharding_propagation_to_\w+=\{[a-z,]*\}'
)
_METADATA = re.compile(rf",? ?(?:{METADATA.pattern}|stack_frame_id=\d+)")
_WHOLE = re.compile(  # what arguments that were put on the one device have, and others have not
    r",? ?sharding=\{(?:mesh\[\], )?(?:replicated|\[(?:\{\}(?:, )?)*\])\}"
)

# XLA's number of a constant, which in a step with loops differs from one process to the next
_NUMBERED_CONSTANT = re.compile(r"\bconstant[._]\d[\w.]*")
_BY = re.compile(r'custom_call_target="([^"]+)"|"kind":"(?!kCustom)([^"]+)"')


class UnreadableModuleError(MemplanError, ValueError):
    """Text that is not a scheduled module as this version of memplan knows it."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation. What XLA says of it is read once, when it is asked for."""

    name: str
    opcode: str
    shape: Shape  # of the result
    operands: tuple[str, ...]  # names, in order
    attributes: str  # what follows the operands; of a parameter its number, of a constant its value
    root: bool = False
    text: str = field(default="", repr=False, compare=False)  # the line that was read; "" of a new one
    # what follows the number of a parameter, or the value of a constant
    _after_literal: str = field(default="", repr=False, compare=False)

    @cached_property
    def line(self) -> str:
        """The instruction as HLO writes it."""
        return self.text or self._written()

    def _written(self) -> str:
        operands, attributes = ", ".join(f"%{operand}" for operand in self.operands), self.attributes
        if self.opcode in ("parameter", "constant"):
            operands, attributes = self.attributes, self._after_literal
            if operands.startswith("{...}"):  # which large one it is follows
                operands, _, attributes = operands.partition(", ")
        attributes = attributes and f", {attributes}"
        root = "ROOT " if self.root else ""
        return f"  {root}%{self.name} = {shape_text(self.shape)} {self.opcode}({operands}){attributes}"

    def changed(
        self,
        *,
        name: str | None = None,
        opcode: str | None = None,
        operands: Sequence[str] | None = None,
        shape: Shape | None = None,
        root: bool | None = None,
        called: Mapping[str, str] | None = None,
        index: int | None = None,
        ordered: bool = True,
        kind: str | None = None,
        frontend_attributes: Mapping[str, str] | None = None,
        backend_config: str | None = None,
        channel: int | None = None,
        in_place: bool = True,
    ) -> Instruction:
        """A copy with another name, other operands, another shape, ...; itself if that changes nothing.

        Args:
          root: is it the root of its computation?
          called: computations that it calls -> those that it calls instead.
          index: of a get-tuple-element.
          ordered: False drops the instructions that must run before it without being read.
          kind: of a fusion.
          backend_config: JSON text.
          in_place: False drops the pairs of outputs and operands that are one buffer.
        """
        attributes = self.attributes
        for old, new in (called or {}).items():
            attributes = re.sub(rf"%{re.escape(old)}(?![\w.\-])", f"%{new}", attributes)
        if index is not None:
            attributes = _INDEX.sub(f"index={index}", attributes, count=1)
        if not ordered:
            attributes = _AFTER.sub("", attributes).lstrip(", ")
        if channel is not None:
            attributes = _CHANNEL.sub(f"channel_id={channel}", attributes, count=1)
        if not in_place:
            attributes = _IN_PLACE.sub("", attributes).lstrip(", ")
        if kind is not None:
            attributes = _KIND.sub(f"kind={kind}", attributes, count=1)
        if frontend_attributes is not None:
            pairs = ",".join(f'{key}="{value}"' for key, value in frontend_attributes.items())
            attributes = _with_attribute(attributes, "frontend_attributes", self._frontend, f"{{{pairs}}}")
        if backend_config is not None:
            attributes = _with_attribute(attributes, "backend_config", self.backend_config, backend_config)
        changed = Instruction(
            self.name if name is None else name,
            self.opcode if opcode is None else opcode,
            self.shape if shape is None else shape,
            self.operands if operands is None else tuple(operands),
            attributes,
            self.root if root is None else root,
            _after_literal=self._after_literal,
        )
        return self if changed == self else replace(changed, text=self._text_of(changed))

    def _text_of(self, changed: Instruction) -> str:
        """The line of a changed copy with the comments of XLA's line, which fingerprints count; "" if it has none."""
        is_literal = self.opcode in ("parameter", "constant")
        if "/*" not in self.text or is_literal or (changed.opcode, changed.shape) != (self.opcode, self.shape):
            return ""
        if not self.attributes or not changed.attributes:
            return ""
        line = self.line_with(changed.name, changed.operands).strip().removeprefix("ROOT ")
        root = "ROOT " if changed.root else ""
        return f"  {root}{line.removesuffix(self.attributes)}{changed.attributes}"

    def with_operands(self, now: Mapping[str, str]) -> Instruction:
        """The instruction with operands renamed; itself if it reads none of them."""
        if now.keys().isdisjoint(self.operands):
            return self
        return self.changed(operands=[now.get(name, name) for name in self.operands])

    @cached_property
    def result(self) -> tuple[Array, ...]:
        """The shape's leaves, in order."""
        return tuple(leaves(self.shape))

    @cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.result)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls."""
        attributes = self.attributes
        if "=%" not in attributes and "{%" not in attributes:
            return ()
        return tuple(name for names in _CALLED.findall(attributes) for name in NAME.findall(names))

    @property
    def body(self) -> str:
        """The computation that a loop runs in each trip."""
        return self._attribute("body").lstrip("%")

    @property
    def condition(self) -> str:
        """The computation that says whether a loop makes another trip."""
        return self._attribute("condition").lstrip("%")

    @property
    def to_apply(self) -> str:
        """The computation that combines two elements, of a reduction, a scatter or a sum over devices."""
        return self._attribute("to_apply").lstrip("%")

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(self._attribute("index"))

    @property
    def parameter_number(self) -> int:
        return int(self.attributes)

    @cached_property
    def kind(self) -> str:
        """The kind of a fusion, which names its emitter: kLoop, kInput, kCustom; "" of other instructions."""
        return self._attribute("kind")

    @cached_property
    def target(self) -> str:
        """What a custom call calls; "" of other instructions."""
        target = _TARGET.search(self.attributes)
        return target[1] if target and self.opcode.startswith("custom-call") else ""

    @property
    def is_allocation(self) -> bool:
        """Does it only allocate its result?"""
        return self.target == "AllocateBuffer"

    @cached_property
    def trip_count(self) -> int | None:
        """Trips of a loop; None if XLA does not know."""
        trips = _TRIPS.search(self.attributes)
        return int(trips[1]) if trips else None

    @cached_property
    def backend_config(self) -> str:
        """JSON text of the back end's configuration; "" if there is none."""
        begin = self.attributes.find(_CONFIG)
        if begin < 0:
            return ""
        begin += len(_CONFIG) - 1
        return self.attributes[begin : _end_of_braces(self.attributes, begin)]

    @cached_property
    def frontend_attributes(self) -> Mapping[str, str]:
        return dict(_FRONTEND_PAIR.findall(self._frontend)) if "frontend_attributes=" in self.attributes else {}

    @property
    def _frontend(self) -> str:
        """Text of the frontend attributes, braces included; "" if there are none."""
        attributes = _FRONTEND.search(self.attributes)
        return f"{{{attributes[1]}}}" if attributes else ""

    @cached_property
    def predecessors(self) -> tuple[str, ...]:
        """Names of instructions that must run before it although it does not read them."""
        names = _PREDECESSORS.search(self.attributes)
        return tuple(NAME.findall(names[1])) if names else ()

    @cached_property
    def has_side_effect(self) -> bool:
        return "has_side_effect" in self.attributes and bool(_EFFECT.search(self.attributes))

    @cached_property
    def aliased_outputs(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(index of a part of the result, position of an operand) pairs that the instruction says are one buffer."""
        pairs = "output_to_operand" in self.attributes and _ALIASED.search(self.attributes)
        return tuple((_ints(index), int(position)) for index, position in _PAIR.findall(pairs[1] if pairs else ""))

    @cached_property
    def op_name(self) -> str:
        """jax's name stack and primitive, as `jit(step)/transpose(jvp(UNet))/conv/mul`; "" if XLA lost it."""
        metadata = _OP_NAME.search(self.line)
        return metadata[1] if metadata else ""

    @cached_property
    def frame(self) -> int:
        """Number of the stack frame of the user's code, in `Module.frames`; 0 if there is none."""
        frame = _FRAME.search(self.line)
        return int(frame[1]) if frame else 0

    @cached_property
    def dimensions(self) -> tuple[int, ...]:
        """Of a reduction, a transpose, a concatenation, a broadcast, a gather over devices."""
        dimensions = _DIMENSIONS.search(self.attributes)
        return _ints(dimensions[1]) if dimensions else ()

    @cached_property
    def slices(self) -> tuple[tuple[int, int, int], ...]:
        """(start, limit, stride) of a slice along each dimension."""
        ranges = _RANGES.search(self.attributes)
        numbers = ([*map(int, text.split(":")), 1] for text in _RANGE.findall(ranges[1] if ranges else ""))
        return tuple((start, limit, stride) for start, limit, stride, *_ in numbers)

    @cached_property
    def slice_sizes(self) -> tuple[int, ...]:
        """Sizes of a dynamic slice."""
        sizes = _SLICE_SIZES.search(self.attributes)
        return _ints(sizes[1]) if sizes else ()

    @cached_property
    def padding(self) -> tuple[tuple[int, int, int], ...]:
        """(low, high, interior) of a pad along each dimension."""
        padding = _PADDING.search(self.attributes)
        numbers = ([*map(int, side.split("_")), 0] for side in padding[1].split("x")) if padding else ()
        return tuple((low, high, interior) for low, high, interior, *_ in numbers)

    @cached_property
    def contracted(self) -> tuple[int, ...]:
        """Dimensions of the left operand that a matrix product sums over; a library's product says so, too."""
        dimensions = _CONTRACTED.search(self.attributes)
        return tuple(map(int, re.findall(r"\d+", dimensions[1]))) if dimensions else ()

    @cached_property
    def filter_labels(self) -> str:
        """Of a convolution: for each dimension of the filter `i`, `o` or the number of a spatial dimension."""
        labels = _FILTER_LABELS.search(self.attributes)
        return labels[1] if labels else ""

    @cached_property
    def base_dilation(self) -> tuple[int, ...]:
        """Dilation of a convolution's image; () if there is none."""
        dilation = _DILATION.search(self.attributes)
        return tuple(map(int, dilation[1].split("x"))) if dilation else ()

    @cached_property
    def batch_groups(self) -> int:
        return int(groups[1]) if (groups := _BATCH_GROUPS.search(self.attributes)) else 1

    @cached_property
    def feature_groups(self) -> int:
        return int(groups[1]) if (groups := _FEATURE_GROUPS.search(self.attributes)) else 1

    @cached_property
    def channel(self) -> int | None:
        """Channel of a collective."""
        channel = "channel_id=" in self.attributes and _CHANNEL.search(self.attributes)
        return int(channel[1]) if channel else None

    @cached_property
    def counts_devices(self) -> bool:
        """Are the numbers in a collective's groups those of devices, over replicas and partitions?"""
        return "use_global_device_ids=true" in self.attributes

    @cached_property
    def source_target_pairs(self) -> tuple[tuple[int, int], ...]:
        """Of a collective-permute: who sends, and to whom."""
        pairs = _SOURCES.search(self.attributes)
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])) if pairs else ()

    def groups(self, partitions: int) -> Groups:
        """Replica groups of a collective; one of all partitions if it names none.

        Raises:
          UnsupportedProgramError: a notation that memplan does not know.
        """
        return replica_groups(self.attributes, partitions)

    @property
    def has_metadata(self) -> bool:
        """Does it say where in the user's program it comes from?"""
        return METADATA.search(self.line) is not None

    @cached_property
    def integers(self) -> tuple[int, ...] | None:
        """Elements of a constant of integers, in order; None of other constants, and of a large one."""
        literal = self.attributes.partition("metadata=")[0]
        if self.opcode != "constant" or "..." in literal or not re.fullmatch(r"[{}\s,\-\d]*", literal):
            return None
        return tuple(map(int, re.findall(r"-?\d+", literal)))

    @cached_property
    def is_zero(self) -> bool:
        """Is it a constant whose elements are all zero?"""
        literal = self.attributes.partition("metadata=")[0]
        return self.opcode == "constant" and "0" in literal and not set(literal) - set("{}(), -.0")

    @cached_property
    def is_positive_zero(self) -> bool:
        """Is it a constant of real numbers that are all +0?"""
        return self.opcode == "constant" and "0" in self.attributes and not set(self.attributes) - set("{} ,0")

    @property
    def is_elided(self) -> bool:
        """Is it a constant whose elements the module does not list?"""
        return self.opcode == "constant" and self.attributes.startswith("{...}")

    @cached_property
    def statement(self) -> tuple[tuple[str, Hashable], ...]:
        """All that it says, as (field, value) pairs: equal where two instructions say the same.

        Left out are its name, operands and shape, its source and control predecessors, the names of the computations
        that it calls, and what may differ between equal instructions and is a fact of its own: `kind`, `channel`,
        `backend_config` and `frontend_attributes`. The literal of a constant and a parameter's number are in it.
        """
        if self.opcode == "constant" and not self.is_elided:
            return (("literal", self.attributes),)
        return _statement(METADATA.sub("", self.attributes)) if self.attributes else ()

    def _attribute(self, name: str) -> str:
        """The text of an attribute up to the next comma or blank; "" if there is none."""
        value = re.search(rf"\b{re.escape(name)}=([^,\s]*)", self.attributes)
        return value[1] if value else ""

    def attribute(self, name: str) -> str:  # until every reader asks for a fact by its name
        return self._attribute(name)

    def line_with(self, name: str, operands: Sequence[str]) -> str:  # until every rewrite makes instructions
        """The line under another name, with other operands, as many as before or not."""
        line = self.line.replace(f"%{self.name} = ", f"%{name} = ", 1)
        if list(operands) == list(self.operands):
            return line
        before, opened, rest = line.partition(f" {self.opcode}(")
        _, closed, after = rest.partition(")")
        return before + opened + ", ".join(f"%{operand}" for operand in operands) + closed + after


@dataclass(frozen=True)
class Computation:
    """A computation in schedule order."""

    name: str
    text: str  # as it stands, without blank lines around it
    # lines that are the same in it need not be read again
    reuse_parse_of: Computation | None = field(default=None, repr=False, compare=False)
    # by kind of the fusion that calls it, which result may be written over which parameter (`aliasing`)
    alias_cache: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def ops(self) -> Mapping[str, Instruction]:
        before = () if self.reuse_parse_of is None else self.reuse_parse_of.ops.values()
        known = {op.line: op for op in before}
        lines = self.text.split("\n")[1:-1]
        return {op.name: op for op in (known.get(line) or read_instruction(line) for line in lines)}

    @cached_property
    def root(self) -> Instruction:
        return next(op for op in self.ops.values() if op.root)

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[Instruction, int]]]:
        """For every instruction: its readers and the operand positions."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for position, name in enumerate(op.operands):
                found[name].append((op, position))
        return found

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {op.parameter_number: op for op in self.ops.values() if op.opcode == "parameter"}

    @cached_property
    def results(self) -> tuple[Instruction, ...]:
        """The results of the root, one instruction for each element of its tuple."""
        names = self.root.operands if self.root.opcode == "tuple" else (self.root.name,)
        return tuple(self.ops[name] for name in names)

    @cached_property
    def by_leaf(self) -> tuple[Instruction, ...]:
        """For every leaf of the root's results: its element, which may itself be a tuple."""
        return tuple(op for op in self.results for _ in op.result)

    @cached_property
    def large_constants(self) -> tuple[Instruction, ...]:
        """Its constants of at least `LARGE_NBYTES`, in order.

        The device holds them in addition to what `memory_analysis()` counts, one for each
        instruction: XLA:GPU makes them globals of the code that it loads. Smaller constants are not
        counted at all, as in XLA.
        """
        if " constant(" not in self.text:
            return ()
        constants = map(read_instruction, _CONSTANT.findall(self.text))
        return tuple(op for op in constants if op.nbytes >= LARGE_NBYTES)

    def text_with(self, lines: Iterable[str]) -> str:  # until every rewrite makes instructions
        """The text with other instructions."""
        first, *_, last = self.text.split("\n")
        return "\n".join([first, *lines, last])

    def cloned(self, name: str, called: Mapping[str, str]) -> Computation:
        """A copy under another name, which calls other computations: those that it calls -> those instead."""
        head, *_, end = self.text.replace(f"%{self.name} (", f"%{name} (", 1).split("\n")
        ops = [op.changed(called=called) if op.called else op for op in self.ops.values()]
        return _with_ops(name, "\n".join([head, *(op.line for op in ops), end]), ops)

    def with_ops(self, ops: Iterable[Instruction]) -> Computation:
        """The computation with other instructions, in this order."""
        ops = list(ops)
        return _with_ops(self.name, self.text_with(op.line for op in ops), ops)

    @staticmethod
    def fused(name: str, parameters: Sequence[tuple[str, Shape]], ops: Sequence[Instruction]) -> Computation:
        """A new computation for a fusion.

        Args:
          parameters: names and shapes, in order.
          ops: its instructions without parameters; one is the root.
        """
        given = [
            Instruction(parameter, "parameter", shape, (), str(number))
            for number, (parameter, shape) in enumerate(parameters)
        ]
        arguments = ", ".join(f"{parameter}: {shape_text(bare(shape))}" for parameter, shape in parameters)
        root = next(op for op in ops if op.root)
        head = f"%{name} ({arguments}) -> {shape_text(bare(root.shape))} {{"
        both = [*given, *ops]
        return _with_ops(name, "\n".join([head, *(op.line for op in both), "}"]), both)

    def behind_bitcasts(self, op: Instruction) -> Instruction:
        while op.opcode == "bitcast":
            op = self.ops[op.operands[0]]
        return op


def _with_ops(name: str, text: str, ops: Sequence[Instruction]) -> Computation:
    """A computation whose instructions need not be read."""
    computation = Computation(name, text)
    computation.__dict__["ops"] = {op.name: op for op in ops}
    return computation


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the Python stack that traced an instruction."""

    file: str  # "" if XLA lost it
    line: int  # 0 if XLA lost it
    parent: int  # number of the frame around it; 0 if there is none


@dataclass(frozen=True)
class Module(Mapping[str, Computation]):
    """A scheduled module: computations by name."""

    head: str  # what stands before the first computation: options, tables of files and stack frames
    texts: Mapping[str, str]  # of every computation, in order
    entry_name: str  # of the one that runs
    # computations that are the same in it need not be read again
    reuse_parse_of: Module | None = field(default=None, repr=False, compare=False)
    _parsed: dict[str, Computation] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Computation:
        if name not in self._parsed:
            text = self.texts[name]
            known = self.reuse_parse_of
            parsed = known[name] if known is not None and name in known else None
            if parsed is None or parsed.text != text:
                parsed = Computation(name, text, parsed)
            self._parsed[name] = parsed
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def entry(self) -> Computation:
        return self[self.entry_name]

    def with_texts(self, texts: Mapping[str, str]) -> Module:
        """The module with other computations, itself with its own; what stays is not read again."""
        return self if texts is self.texts else Module(self.head, texts, self.entry_name, self)

    def with_computations(self, computations: Mapping[str, Computation]) -> Module:
        """The module with other computations; callees come before their callers."""
        texts = {name: body.text for name, body in computations.items()}
        module = Module(self.head, texts, self.entry_name, self)
        module._parsed.update(computations)
        return module

    @property
    def name(self) -> str:
        return self.head.partition(" ")[2].partition(",")[0]

    @cached_property
    def options(self) -> tuple[tuple[str, Hashable], ...]:
        """What the module says beside its name, computations and stack frames, such as donated arguments and layouts,
        as (field, value) pairs. Whether it is scheduled is left out.
        """
        fields = _fields(self.head.partition("\n")[0].partition(", ")[2])
        return tuple((name, value) for name, value in fields if name != "is_scheduled")

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Instructions of the entry and of the computations that it runs, by name; a fusion is one instruction."""
        return {op.name: op for op in self._run(self.entry)}

    def _run(self, body: Computation) -> Iterator[Instruction]:
        for op in body.ops.values():
            yield op
            if op.opcode in BLOCKS:
                for name in op.called:
                    yield from self._run(self[name])

    @property
    def large_constants(self) -> Iterator[Instruction]:
        """Large constants of all computations, those inside fusions among them."""
        for body in self.values():
            yield from body.large_constants

    @cached_property
    def frames(self) -> Mapping[int, Frame]:
        """Stack frames by number (`Instruction.frame`)."""
        tables = dict(_TABLE.findall(self.head))
        files = dict(_FILE.findall(tables.get("FileNames", "")))
        locations = {
            location: (files.get(file, ""), int(line))
            for location, file, line in _LOCATION.findall(tables.get("FileLocations", ""))
        }
        frames: dict[int, Frame] = {}
        for number, location, parent in _STACK_FRAME.findall(tables.get("StackFrames", "")):
            # XLA prints the number after that of the frame around it, 1 if there is none.
            above = int(parent or 1) - 1
            frames[int(number)] = Frame(*locations.get(location, ("", 0)), above)
        return frames

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the instructions and their order, without the module's name and source lines."""
        options = _OF_THE_CALL.sub("", self.head.partition("\n")[0].partition(",")[2])
        plain = (_WHOLE.sub("", _METADATA.sub("", text)) for text in self.texts.values())
        return _digest([options, *plain])

    @cached_property
    def structure(self) -> str:
        """Digest of what reads what, by name: it stays where XLA chooses other algorithms for the same kernels."""
        lines = (f"{op.name} {op.opcode} {' '.join(op.operands)}" for op in self.instructions.values())
        return _digest(lines)

    @cached_property
    def chosen_kernels(self) -> Mapping[str, str]:
        """For every autotuned kernel: its library or generator, and a digest of its configuration."""
        found: dict[str, str] = {}
        for op in self.instructions.values():
            if op.opcode == "custom-call" or "kind=kCustom" in op.attributes:
                by = _BY.search(op.attributes)
                told = shape_text(op.shape) + NAME.sub("", _METADATA.sub("", op.attributes))
                maker = (by[1] or by[2]) if by else op.opcode
                found[op.name] = f"{maker} {hashlib.sha256(told.encode()).hexdigest()[:8]}"
        return found

    @cached_property
    def aliases(self) -> Mapping[int, int]:
        """Number of an output -> number of the donated argument that it is written over.

        Raises:
          UnreadableModuleError: an argument or an output is a tuple of tuples, which jax never makes.
        """
        options = self.head.partition("\n")[0]
        begin = options.find("input_output_alias={")
        found: dict[int, int] = {}
        for one in _ALIAS.finditer(options, begin) if begin >= 0 else ():
            if one["index"] or "," in one["output"]:
                raise UnreadableModuleError(f"{self.name} donates a part of a tuple: {one[0]}.")
            found[int(one["output"] or 0)] = int(one["argument"])
        return found


def predecessors(op: Instruction) -> list[str]:  # until every reader asks for `op.predecessors`
    return list(op.predecessors)


def _with_attribute(attributes: str, name: str, old: str, new: str) -> str:
    """Attributes with the value of one changed, or with one more."""
    if old:
        return attributes.replace(f"{name}={old}", f"{name}={new}", 1)
    return ", ".join(filter(None, (attributes, f"{name}={new}")))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _end_of_braces(text: str, begin: int) -> int:
    """Where the brace that opens at `begin` is closed; braces in quotes do not count."""
    depth = 0
    for at in _BRACES.finditer(text, begin):
        depth += (at[0] == "{") - (at[0] == "}")
        if not depth:
            return at.end()
    return len(text)


@lru_cache(maxsize=1 << 16)  # instructions of a module differ in their metadata more than in what they say
def _statement(attributes: str) -> tuple[tuple[str, Hashable], ...]:
    """See `Instruction.statement`; metadata have been removed."""
    return tuple((name, NAME.sub("%", value)) for name, value in _fields(attributes) if not _is_fact(name, value))


def _is_fact(name: str, value: str) -> bool:
    """Does a fact of the instruction say all that this attribute says?"""
    if name == "backend_config":
        return value.startswith("{")
    if name == "frontend_attributes":
        return value[1:-1] == ",".join(f'{key}="{text}"' for key, text in _FRONTEND_PAIR.findall(value))
    return name in ("metadata", "control-predecessors", "kind", "channel_id")


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) pairs of attributes or options; commas within quotes or brackets separate none."""
    depth = begin = 0
    ends: list[tuple[int, int]] = []  # of a field, and where the next one begins
    for token in _BRACKET_OR_COMMA.finditer(text):
        depth += (token[0] in "[({") - (token[0] in "])}")
        if token[0] == ", " and not depth:
            ends.append(token.span())
    for end, following in [*ends, (len(text), len(text))]:
        name, _, value = text[begin:end].partition("=")
        if name:
            yield name, value
        begin = following


def without_metadata(attributes: str) -> str:
    """Attributes of an instruction without where it comes from."""
    return _METADATA.sub("", attributes).lstrip(", ")


class Names:
    """Names of a module, and new ones: the old name, a mark and a number."""

    def __init__(self, module: Module) -> None:
        self._taken = {name for body in module.values() for name in body.ops} | set(module)

    def fresh(self, name: str, mark: str, number: int = 1) -> str:
        """The first from this number on that is not taken."""
        while (found := f"{name}.{mark}{number}") in self._taken:
            number += 1
        self._taken.add(found)
        return found


class Edit:
    """Changes a module: the one way to do so.

    Instructions and computations are values: an edit replaces computations by others (`Computation.with_ops`) and adds
    new ones (`Computation.fused`, `clone`); what it does not touch stays the same object.
    """

    def __init__(self, module: Module) -> None:
        self._module, self._names = module, Names(module)
        self._changed: dict[str, Computation] = {}
        self._new: dict[str, list[Computation]] = {}  # by the computation that they stand before

    def fresh(self, name: str, mark: str, number: int = 1) -> str:
        """A new name: the old one, a mark and the first number from this one on that is not taken."""
        return self._names.fresh(name, mark, number)

    def __getitem__(self, name: str) -> Computation:
        """The computation as it is by now."""
        return self._changed.get(name) or self._module[name]

    def replace(self, body: Computation, new: Iterable[Computation] = ()) -> None:
        """Put another computation in the place of the one with its name, and new ones that it calls before it."""
        self._changed[body.name] = body
        self._new.setdefault(body.name, []).extend(new)

    def clone(self, name: str, mark: str, number: int = 1) -> list[Computation]:
        """Copies of a computation and of those that it calls, as the module has them; callees first, its own last.

        Args:
          mark, number: of the new names, see `fresh`.
        """
        copied, body = self.fresh(name, mark, number), self._module[name]
        called: dict[str, str] = {}
        copies: list[Computation] = []
        for callee in dict.fromkeys(callee for op in body.ops.values() for callee in op.called):
            copies += self.clone(callee, mark, number)
            called[callee] = copies[-1].name
        return [*copies, body.cloned(copied, called)]

    @property
    def module(self) -> Module:
        """The module with all changes; the module itself if there are none."""
        if not self._changed:
            return self._module
        computations: dict[str, Computation] = {}
        for name in self._module:
            computations.update((body.name, body) for body in self._new.get(name, ()))
            computations[name] = self[name]
        return self._module.with_computations(computations)


def bitcast(name: str, shape: Shape, operand: str) -> Instruction:
    """The operand's bytes under another shape."""
    return Instruction(name, "bitcast", shape, (operand,), "")


def tuple_element(name: str, shape: Shape, operand: str, index: int) -> Instruction:
    return Instruction(name, "get-tuple-element", shape, (operand,), f"index={index}")


def tuple_of(name: str, shapes: Sequence[Shape], operands: Sequence[str], root: bool = False) -> Instruction:
    return Instruction(name, "tuple", tuple(shapes), tuple(operands), "", root)


def copy(name: str, shape: Shape, operand: str, root: bool = False) -> Instruction:
    return Instruction(name, "copy", shape, (operand,), "", root)


def copy_start(
    name: str, target: Array, source: Array, operand: str, frontend_attributes: Mapping[str, str]
) -> Instruction:
    """The start of an asynchronous copy between memories, which the arrays' layouts name."""
    start = Instruction(name, "copy-start", (target, source, Array("u32", ())), (operand,), "")
    return start.changed(frontend_attributes=frontend_attributes)


def copy_done(name: str, shape: Array, start: str) -> Instruction:
    return Instruction(name, "copy-done", shape, (start,), "")


def _digest(lines: Iterable[str]) -> str:
    """Digest of lines, with constants named by the order of their first use."""
    order: dict[str, str] = {}
    text = _NUMBERED_CONSTANT.sub(lambda name: order.setdefault(name[0], f"constant#{len(order)}"), "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def read_module(text: str, reuse_parse_of: Module | None = None, scheduled: bool = True) -> Module:
    """The computations of a module, as XLA prints it.

    Args:
      reuse_parse_of: see `Module`.
      scheduled: refuse a module whose order is not that in which it runs.

    Raises:
      UnreadableModuleError: the text is not one.
    """
    texts: dict[str, str] = {}
    head: list[str] = []
    current: list[str] | None = None
    name = entry = ""
    for line in text.split("\n"):
        if current is None:
            if header := _HEADER.match(line):
                name, current = header["name"], [line]
                entry = name if line.startswith("ENTRY ") else entry
            elif not texts:
                head.append(line)
        else:
            current.append(line)
            if line.startswith("}"):
                texts[name], current = "\n".join(current), None
    if not entry or (scheduled and "is_scheduled=true" not in (head[0] if head else "")):
        raise UnreadableModuleError(
            "This is not scheduled HLO; pass the text of `jax.jit(step).lower(...).compile().as_text()`."
        )
    return Module("\n".join(head).rstrip("\n"), texts, entry, reuse_parse_of)


def read_instruction(line: str) -> Instruction:
    """One line.

    Raises:
      UnreadableModuleError: it is none.
    """
    found = _LINE.match(line)
    if not found:
        raise UnreadableModuleError(f"memplan cannot read this line of a compiled module: {line.strip()[:200]}")
    root, name, shape, opcode, rest = found.groups()
    closed = _CLOSED.search(rest)
    operands, attributes = (rest[: closed.start()], rest[closed.end() :]) if closed else (rest, "")
    names, after_literal = tuple(NAME.findall(operands)), ""
    if opcode in ("parameter", "constant"):
        names, after_literal = (), attributes
        attributes = f"{operands}, {attributes}" if operands == "{...}" else operands  # which large one it is
    return Instruction(name, opcode, read_shape(shape), names, attributes, bool(root), line, after_literal)


def with_blocks(module: Module, body: Computation) -> Iterator[Computation]:
    """A computation, the bodies and conditions of its loops, the branches of its conditionals, and what it calls."""
    yield body
    for op in body.ops.values():
        if op.opcode in BLOCKS:
            for name in op.called:
                yield from with_blocks(module, module[name])


class Facts(TypedDict, total=False):
    """What a new instruction states, by the names of the facts of `Instruction`."""

    channel: int
    groups: Groups
    counts_devices: bool
    dimensions: Sequence[int]
    slices: Sequence[tuple[int, int, int]]
    padding: Sequence[tuple[int, int, int]]
    index: int
    to_apply: str
    literal: int  # the element of a scalar constant


def instruction(
    name: str,
    opcode: str,
    shape: Shape,
    operands: Sequence[str] = (),
    *,
    like: Instruction | None = None,
    root: bool = False,
    **facts: Unpack[Facts],
) -> Instruction:
    """A new instruction.

    Args:
      like: an instruction of the same source line, which gives the metadata.
    """
    attributes = [text(facts[fact]) for fact, text in _FACT_TEXTS.items() if fact in facts]
    if like is not None and (metadata := METADATA.search(like.line)):
        attributes.append(metadata[0])
    inside = str(facts["literal"]) if "literal" in facts else ", ".join(f"%{operand}" for operand in operands)
    call = f"  {'ROOT ' if root else ''}%{name} = {shape_text(shape)} {opcode}({inside})"
    return read_instruction(", ".join([call, *attributes]))


_FACT_TEXTS: Mapping[str, Callable[..., str]] = {  # in XLA's order
    "channel": lambda channel: f"channel_id={channel}",
    "groups": lambda groups: f"replica_groups={groups_text(groups)}",
    "counts_devices": lambda counts: f"use_global_device_ids={str(counts).lower()}",
    "dimensions": lambda dimensions: f"dimensions={{{','.join(map(str, dimensions))}}}",
    "slices": lambda slices: f"slice={{{', '.join(_range_text(*bounds) for bounds in slices)}}}",
    "padding": lambda padding: f"padding={'x'.join(_padding_text(*sides) for sides in padding)}",
    "index": lambda index: f"index={index}",
    "to_apply": lambda name: f"to_apply=%{name}",
}


def _range_text(start: int, limit: int, stride: int) -> str:
    return f"[{start}:{limit}]" if stride == 1 else f"[{start}:{limit}:{stride}]"


def _padding_text(low: int, high: int, interior: int) -> str:
    return f"{low}_{high}_{interior}" if interior else f"{low}_{high}"
