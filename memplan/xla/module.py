"""XLA's module as a graph: computations and instructions by name, read from a HloModuleProto.

Everything is a value. An instruction knows its operands, and the computations that it calls, by
name; the message that it was read from keeps all that memplan does not look at. `Edit` changes a
module, and `serialize` writes it: XLA wants a number of everything, and it gets them there.

XLA wraps what runs asynchronously in a computation of its own, with an `async-start` that calls it.
Here, as in XLA's text, such a pair is one `fusion-start` and one `fusion-done` (or
`all-reduce-start`, ...), which say what the wrapped instruction says.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, Unpack

from memplan.hardware.machine import Groups
from memplan.xla.replica_groups import replica_groups
from memplan.xla.schema import InstructionMessage, ModuleMessage, UnreadableModuleError, unreadable
from memplan.xla.shapes import Array, Shape, leaves, shape_of
from memplan.xla.trips import count_trips

# what they call runs kernel by kernel, as the entry does
BLOCKS = frozenset({"call", "conditional", "while"})
LARGE_NBYTES = 1 << 16  # of a constant: the device holds it beside what `memory_analysis()` counts

# Fields of an instruction's message that are facts of their own, or say where it is or comes from.
_FACTS = (
    "name", "shape", "metadata", "fusion_kind", "channel_id", "id", "operand_ids",
    "control_predecessor_ids", "called_computation_ids", "sharding", "backend_config",
    "frontend_attributes",
)  # fmt: skip
# Fields of a module's message that are not its options.
_NO_OPTIONS = (
    "name",
    "computations",
    "schedule",
    "stack_frame_index",
    "entry_computation_id",
    "id",
)
# Options that differ from call to call of one step: where jax left the sharding of arguments and
# results to XLA, on which devices it runs, and how XLA's passes came to it.
_OF_THE_CALL = (
    "spmd_output_sharding",
    "spmd_parameters_shardings",
    "profile_info",
    "device_assignment",
    "frontend_attributes",
)

# XLA's number of a constant, which in a step with loops differs from one process to the next
_NUMBERED_CONSTANT = re.compile(r"\bconstant[._]\d[\w.]*")


class Frame(NamedTuple):
    """A frame of the Python stack that traced an instruction."""

    file: str  # "" if XLA lost it
    line: int  # 0 if XLA lost it
    parent: int  # number of the frame around it; 0 if there is none


class Changes(TypedDict, total=False):
    """What `Instruction.changed` changes; None changes nothing."""

    name: str | None
    opcode: str | None
    operands: Sequence[str] | None
    shape: Shape | None
    root: bool | None  # is it the root of its computation?
    called: Mapping[str, str] | None  # computations that it calls -> those that it calls instead
    index: int | None  # of a get-tuple-element
    kind: str | None  # of a fusion
    frontend_attributes: Mapping[str, str] | None
    backend_config: str | None  # JSON
    channel: int | None
    in_place: bool  # False drops the pairs of outputs and operands that are one buffer
    ordered: bool  # False drops the instructions that must run before it without being read


# Changes that are fields of an instruction's message.
_FIELDS = {
    "index": "tuple_index",
    "kind": "fusion_kind",
    "backend_config": "backend_config",
    "opcode": "opcode",
    "channel": "channel_id",
}


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation."""

    name: str
    opcode: str
    shape: Shape  # of the result
    operands: tuple[str, ...]  # names, in order
    called: tuple[str, ...]  # names of the computations that it calls; a loop's condition first
    # names of instructions that must run before it although it does not read them
    predecessors: tuple[str, ...]
    root: bool
    # of the instruction itself, or of what an asynchronous start wraps
    message: Any = field(repr=False, compare=False)
    # of the asynchronous start, where it wraps another
    start: Any = field(default=None, repr=False, compare=False)
    counted_trips: int | None = field(default=None, repr=False, compare=False)  # `count_trips`

    def changed(self, **changes: Unpack[Changes]) -> Instruction:
        """A copy that states something else; itself if that changes nothing."""
        called = changes.get("called") or {}
        names = ("name", "opcode", "operands", "shape", "root")
        facts = {name: changes.get(name) for name in names}
        facts = {name: value for name, value in facts.items() if value is not None}
        if "operands" in facts:
            facts["operands"] = tuple(facts["operands"])
        message, start = self._changed_messages(changes)
        changed = replace(
            self,
            **facts,
            called=tuple(called.get(name, name) for name in self.called),
            predecessors=self.predecessors if changes.get("ordered", True) else (),
            message=message,
            start=start,
        )
        is_same = message is self.message and start is self.start and changed == self
        return self if is_same else changed

    def _changed_messages(self, changes: Changes) -> tuple[Any, Any]:
        """The messages of the instruction and of its asynchronous start; the same where nothing
        changes.
        """
        message, start = self.message, self.start
        fields = {field: changes.get(name) for name, field in _FIELDS.items()}
        fields = {field: value for field, value in fields.items() if value is not None}
        if fields:
            message = _copy_of(message)
            for field, value in fields.items():
                setattr(message, field, value.encode() if field == "backend_config" else value)
        attributes = changes.get("frontend_attributes")
        drops_aliases = not changes.get("in_place", True) and bool(self.aliased_outputs)
        if attributes is None and not drops_aliases:
            return message, start
        pair = _copy_of(message if start is None else start)
        if drops_aliases:
            pair.ClearField("output_operand_aliasing")
        if attributes is not None:
            _set_attributes(pair, attributes)
        return (pair, None) if start is None else (message, pair)

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

    @property
    def body(self) -> str:
        """The computation that a loop runs in each trip."""
        return self.called[1]

    @property
    def condition(self) -> str:
        """The computation that says whether a loop makes another trip."""
        return self.called[0]

    @property
    def to_apply(self) -> str:
        """The computation that combines two elements, of a reduction, a scatter or a sum over
        devices.
        """
        return self.called[-1]

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return self.message.tuple_index

    @property
    def parameter_number(self) -> int:
        return self.message.parameter_number

    @property
    def kind(self) -> str:
        """The kind of a fusion, which names its emitter: kLoop, kInput, kCustom; "" of other
        instructions.
        """
        return self.message.fusion_kind

    @property
    def target(self) -> str:
        """What a custom call calls; "" of other instructions."""
        return self.message.custom_call_target

    @property
    def is_allocation(self) -> bool:
        """Does it only allocate its result?"""
        return self.target == "AllocateBuffer"

    @cached_property
    def backend_config(self) -> str:
        """JSON text of the back end's configuration; "" if there is none."""
        config = self.message.backend_config or (self.start.backend_config if self.start else b"")
        return config.decode(errors="surrogateescape")

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        """The back end's configuration; {} where it is no JSON object."""
        try:
            config = json.loads(self.backend_config or "{}")
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    @cached_property
    def trip_count(self) -> int | None:
        """Trips of a loop; None if it is not known."""
        known = self._config.get("known_trip_count") if self.opcode == "while" else None
        return int(known["n"]) if known else self.counted_trips

    @property
    def trips(self) -> int:
        """Trips of a loop; 1 if it is not known."""
        return 1 if self.trip_count is None else self.trip_count

    @property
    def _pair(self) -> Any:
        """The message of the instruction itself, an asynchronous start if it is one."""
        return self.message if self.start is None else self.start

    @cached_property
    def frontend_attributes(self) -> Mapping[str, str]:
        return {entry.key: entry.value for entry in self._pair.frontend_attributes.map}

    @property
    def has_side_effect(self) -> bool:
        return self.message.custom_call_has_side_effect

    @cached_property
    def aliased_outputs(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(index of a part of the result, position of an operand) pairs that the instruction says
        are one buffer.
        """
        pairs = self._pair.output_operand_aliasing or self.message.output_operand_aliasing
        return tuple((tuple(pair.output_shape_index), pair.operand_index) for pair in pairs)

    @property
    def metadata(self) -> Any:
        """The message that says where in the user's program it comes from."""
        return self._pair.metadata

    @property
    def op_name(self) -> str:
        """jax's name stack and primitive, as `jit(step)/transpose(jvp(UNet))/conv/mul`; "" if XLA
        lost it.
        """
        return self.metadata.op_name

    @property
    def frame(self) -> int:
        """Number of the stack frame of the user's code, in `Module.frames`; 0 if there is none."""
        return self.metadata.stack_frame_id

    @property
    def has_metadata(self) -> bool:
        """Does it say where in the user's program it comes from?"""
        return self._pair.HasField("metadata")

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Of a reduction, a transpose, a concatenation, a broadcast, a gather over devices."""
        return tuple(self.message.dimensions)

    @property
    def fft_lengths(self) -> tuple[int, ...]:
        """Points of a Fourier transform along the last dimensions."""
        return tuple(self.message.fft_length)

    @property
    def slices(self) -> tuple[tuple[int, int, int], ...]:
        """(start, limit, stride) of a slice along each dimension."""
        return tuple(
            (side.start, side.limit, side.stride) for side in self.message.slice_dimensions
        )

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """Sizes of a dynamic slice."""
        return tuple(self.message.dynamic_slice_sizes)

    @property
    def padding(self) -> tuple[tuple[int, int, int], ...]:
        """(low, high, interior) of a pad along each dimension."""
        sides = self.message.padding_config.dimensions
        return tuple(
            (side.edge_padding_low, side.edge_padding_high, side.interior_padding) for side in sides
        )

    @cached_property
    def contracted(self) -> tuple[int, ...]:
        """Dimensions of the left operand that a matrix product sums over; a library's product says
        so, too.
        """
        if self.message.HasField("dot_dimension_numbers"):
            return tuple(self.message.dot_dimension_numbers.lhs_contracting_dimensions)
        product = self._config.get("gemm_backend_config", self._config)
        numbers = product.get("dot_dimension_numbers", product)
        return tuple(map(int, numbers.get("lhs_contracting_dimensions", ())))

    @cached_property
    def filter_labels(self) -> str:
        """Of a convolution: for each dimension of the filter `i`, `o` or the number of a spatial
        dimension.
        """
        if not self.message.HasField("convolution_dimension_numbers"):
            return ""
        numbers = self.message.convolution_dimension_numbers
        labels = {
            numbers.kernel_input_feature_dimension: "i",
            numbers.kernel_output_feature_dimension: "o",
        }
        labels |= {
            dimension: str(number)
            for number, dimension in enumerate(numbers.kernel_spatial_dimensions)
        }
        return "".join(labels[dimension] for dimension in sorted(labels))

    @property
    def batch_dimension(self) -> int:
        """Dimension of a convolution's image that is its batch."""
        return self.message.convolution_dimension_numbers.input_batch_dimension

    @property
    def base_dilation(self) -> tuple[int, ...]:
        """Dilation of a convolution's image; () if there is none."""
        dilation = tuple(side.base_dilation for side in self.message.window.dimensions)
        return dilation if any(factor > 1 for factor in dilation) else ()

    @property
    def batch_groups(self) -> int:
        return self.message.batch_group_count or 1

    @property
    def feature_groups(self) -> int:
        return self.message.feature_group_count or 1

    @property
    def channel(self) -> int | None:
        """Channel of a collective."""
        return self.message.channel_id or None

    @property
    def counts_devices(self) -> bool:
        """Are the numbers in a collective's groups those of devices, over replicas and
        partitions?
        """
        return self.message.use_global_device_ids

    @property
    def source_target_pairs(self) -> tuple[tuple[int, int], ...]:
        """Of a collective-permute: who sends, and to whom."""
        return tuple((pair.source, pair.target) for pair in self.message.source_target_pairs)

    def groups(self, partitions: int) -> Groups:
        """Replica groups of a collective; one of all partitions if it names none.

        Raises:
          UnsupportedProgramError: a notation that memplan does not know.
        """
        return replica_groups(self.message) or (tuple(range(partitions)),)

    @cached_property
    def integers(self) -> tuple[int, ...] | None:
        """Elements of a constant of integers, in order; None of others, and of a large one."""
        if self.nbytes >= LARGE_NBYTES:
            return None
        dtype = self.shape.dtype if isinstance(self.shape, Array) else ""
        literal = self.message.literal
        match dtype:
            case "s32" | "s64" | "u32" | "u64":
                return tuple(getattr(literal, f"{dtype}s"))
            case "s8" | "u8" | "s16" | "u16":
                content, nbytes = getattr(literal, f"{dtype}s"), int(dtype[1:]) // 8
                parts = (content[at : at + nbytes] for at in range(0, len(content), nbytes))
                return tuple(
                    int.from_bytes(part, "little", signed=dtype[0] == "s") for part in parts
                )
        return None

    @cached_property
    def is_zero(self) -> bool:
        """Is it a constant of numbers that are all zero?"""
        return self._is_number and len(self._elements) > 0 and not any(self._elements)

    @cached_property
    def is_positive_zero(self) -> bool:
        """Is it a constant of real numbers that are all +0?"""
        is_real = self.is_zero and not self.result[0].dtype.startswith("c")
        return is_real and not any(str(element).startswith("-") for element in self._elements)

    @property
    def _is_number(self) -> bool:
        """Is it a constant of a type that has a zero of no bits?"""
        if self.opcode != "constant" or not isinstance(self.shape, Array):
            return False
        return self.shape.dtype not in ("pred", "f8e8m0fnu")

    @property
    def _elements(self) -> Sequence[Any]:
        """Elements of a constant; bytes of those that protobuf has no type for."""
        assert isinstance(self.shape, Array)
        return getattr(self.message.literal, f"{self.shape.dtype}s")

    @cached_property
    def statement(self) -> tuple[tuple[str, Hashable], ...]:
        """All that it says, as (field, value) pairs: equal where two instructions say the same.

        Left out are its name, operands and shape, its source and control predecessors, the names of
        the computations that it calls, and what may differ between equal instructions and is a fact
        of its own: `kind`, `channel`, `backend_config` and `frontend_attributes`. The literal of a
        constant and a parameter's number are in it.
        """
        message = _copy_of(self.message)
        for name in _FACTS:
            message.ClearField(name)
        literal = b""
        if message.HasField("literal") and self.nbytes >= LARGE_NBYTES:
            literal = hashlib.sha256(message.literal.SerializeToString()).digest()
            message.ClearField("literal")
        return (("message", message.SerializeToString(deterministic=True)), ("literal", literal))


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run; before they are scheduled, each behind what it
    reads.
    """

    name: str
    is_fused: bool  # is it what a fusion calls?
    message: Any = field(repr=False, compare=False)  # as it was read; None of a new one
    # None where the instructions are not the message's
    names: Numbers | None = field(repr=False, compare=False)
    # by kind of the fusion that calls it, which result may be written over which parameter
    # (`aliasing`)
    alias_cache: dict[str, Sequence[tuple[int, int]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def ops(self) -> Mapping[str, Instruction]:
        assert self.names is not None
        return {op.name: op for op in self.names.instructions(self.message)}

    @cached_property
    def root(self) -> Instruction:
        return next(op for op in self.ops.values() if op.root)

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[Instruction, int]]]:
        """For every instruction: its readers and the operand positions."""
        uses: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for position, name in enumerate(op.operands):
                uses[name].append((op, position))
        return uses

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

    def behind_bitcasts(self, op: Instruction) -> Instruction:
        while op.opcode == "bitcast":
            op = self.ops[op.operands[0]]
        return op

    @cached_property
    def large_constants(self) -> tuple[Instruction, ...]:
        """Its constants of at least `LARGE_NBYTES`, in order.

        The device holds them beside what `memory_analysis()` counts, one for each instruction:
        XLA:GPU makes them globals of the code that it loads. It does not count smaller ones.
        """
        # Most computations have none, which their messages tell in a tenth of the time.
        if self.is_as_read and not any(map(_is_large_constant, self.message.instructions)):
            return ()
        constants = (op for op in self.ops.values() if op.opcode == "constant")
        return tuple(op for op in constants if op.nbytes >= LARGE_NBYTES)

    @property
    def is_as_read(self) -> bool:
        return self.names is not None

    @property
    def is_new(self) -> bool:
        """Is it none of the module that was read?"""
        return self.message is None

    def with_ops(self, ops: Iterable[Instruction]) -> Computation:
        """The computation with other instructions, in this order."""
        return _with_ops(Computation(self.name, self.is_fused, self.message, None), ops)

    def cloned(self, name: str, called: Mapping[str, str]) -> Computation:
        """A copy under another name, which calls other computations: those that it calls -> those
        instead.
        """
        ops = [op.changed(called=called) if op.called else op for op in self.ops.values()]
        return _with_ops(Computation(name, self.is_fused, None, None), ops)


def _with_ops(computation: Computation, ops: Iterable[Instruction]) -> Computation:
    computation.__dict__["ops"] = {op.name: op for op in ops}
    return computation


@dataclass(frozen=True)
class Module(Mapping[str, Computation]):
    """Computations by name, callees before their callers."""

    message: Any = field(repr=False, compare=False)  # as it was read
    given: Mapping[str, Computation] | None = None  # in the place of those that were read

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @staticmethod
    def read(proto: bytes, scheduled: bool = True) -> Module:
        """Read a serialized HloModuleProto.

        Args:
          scheduled: refuse a module whose order is not that in which it runs.

        Raises:
          UnreadableModuleError: its numbers are not as memplan knows them, or it is not scheduled.
        """
        module = Module(ModuleMessage.FromString(proto))
        if scheduled and not module.is_scheduled:
            raise UnreadableModuleError(
                f"XLA has not scheduled the module {module.name}. Compile the step: "
                "jax.jit(step).lower(...).compile()."
            )
        for computation in module.message.computations:
            for op in computation.instructions:
                if reason := unreadable(op, computation.id):
                    raise UnreadableModuleError(
                        f"memplan does not understand the instruction {op.name} of "
                        f"{computation.name}: {reason}."
                    )
        return module

    def with_computations(self, computations: Mapping[str, Computation]) -> Module:
        """The module with other computations; callees come before their callers."""
        module = Module(self.message, computations)
        module.__dict__["numbers"] = self.numbers
        return module

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers(self.message)

    @cached_property
    def _computations(self) -> Mapping[str, Computation]:
        if self.given is not None:
            return self.given
        wrappers = self.numbers.wrappers
        return {
            message.name: Computation(
                message.name, message.is_fusion_computation, message, self.numbers
            )
            for message in self.message.computations
            if message.id not in wrappers
        }

    def __getitem__(self, name: str) -> Computation:
        return self._computations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._computations)

    def __len__(self) -> int:
        return len(self._computations)

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def is_scheduled(self) -> bool:
        return bool(self.message.schedule.sequences)

    @cached_property
    def entry_name(self) -> str:
        return self.numbers.computations[self.message.entry_computation_id].name

    @property
    def entry(self) -> Computation:
        return self[self.entry_name]

    @cached_property
    def options(self) -> tuple[tuple[str, Hashable], ...]:
        """What the module says beside its name, computations and stack frames, such as donated
        arguments and layouts, as (field, value) pairs. Whether it is scheduled is left out.
        """
        return (("message", self._options),)

    @cached_property
    def _options(self) -> bytes:
        message = ModuleMessage()
        message.CopyFrom(self.message)
        for name in _NO_OPTIONS:
            message.ClearField(name)
        return message.SerializeToString(deterministic=True)

    @cached_property
    def aliases(self) -> Mapping[int, int]:
        """Number of an output -> number of the donated argument that it is written over.

        Raises:
          UnreadableModuleError: an argument or an output is a tuple of tuples, which jax never
            makes.
        """
        aliases: dict[int, int] = {}
        for entry in self.message.input_output_alias.entries:
            if entry.parameter_shape_index or len(entry.output_shape_index) > 1:
                raise UnreadableModuleError(f"{self.name} donates a part of a tuple: {entry}.")
            aliases[next(iter(entry.output_shape_index), 0)] = entry.parameter_number
        return aliases

    @cached_property
    def frames(self) -> Mapping[int, Frame]:
        """Stack frames by number (`Instruction.frame`)."""
        tables = self.message.stack_frame_index
        frames: dict[int, Frame] = {}
        for number, frame in enumerate(tables.stack_frames, 1):
            location = (
                tables.file_locations[frame.file_location_id - 1]
                if frame.file_location_id
                else None
            )
            if location is None:
                frames[number] = Frame("", 0, frame.parent_frame_id)
                continue
            file = tables.file_names[location.file_name_id - 1] if location.file_name_id else ""
            frames[number] = Frame(file, location.line, frame.parent_frame_id)
        return frames

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Instructions of the entry and of the computations that it runs, by name; a fusion is one
        instruction.
        """
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
    def fingerprint(self) -> str:
        """Digest of the instructions and their order, without the module's name and source
        lines.
        """
        options = ModuleMessage.FromString(self._options)
        for name in _OF_THE_CALL:
            options.ClearField(name)
        ops = (op for body in self.values() for op in body.ops.values())
        return _digest([repr(options.SerializeToString(deterministic=True)), *map(_stated, ops)])

    @cached_property
    def structure(self) -> str:
        """Digest of what reads what, by name: it stays where XLA chooses other algorithms for the
        same kernels.
        """
        lines = (
            f"{op.name} {op.opcode} {' '.join(op.operands)}" for op in self.instructions.values()
        )
        return _digest(lines)

    @cached_property
    def chosen_kernels(self) -> Mapping[str, str]:
        """For every autotuned kernel: its library or generator, and a digest of its
        configuration.
        """
        kernels: dict[str, str] = {}
        for op in self.instructions.values():
            if op.opcode == "custom-call" or op.kind == "kCustom":
                generator = op._config.get("fusion_backend_config", {}).get("kind")
                content = repr((op.result, op.statement, op.backend_config))
                maker = op.target or generator or op.opcode
                kernels[op.name] = f"{maker} {hashlib.sha256(content.encode()).hexdigest()[:8]}"
        return kernels


def _stated(op: Instruction) -> str:
    parts = (
        op.name,
        op.opcode,
        op.shape,
        op.operands,
        op.called,
        op.predecessors,
        op.root,
        op.kind,
        op.channel,
    )
    return repr((*parts, op.statement, op.backend_config, sorted(op.frontend_attributes.items())))


class Numbers:
    """The numbers of a module that was read, and names in their place."""

    def __init__(self, message: Any) -> None:
        self.computations = {computation.id: computation for computation in message.computations}
        self.schedule = {
            entry.key: entry.value.instruction_ids for entry in message.schedule.sequences
        }
        # Computations with nothing but one instruction, which runs asynchronously.
        self.wrappers = {
            op.called_computation_ids[0]
            for computation in message.computations
            for op in computation.instructions
            if op.opcode == "async-start" and self._wraps_one(op.called_computation_ids[0])
        }

    def _wraps_one(self, computation: int) -> bool:
        wrapped = self._wrapped(computation)
        inside = self.computations[computation].instructions
        parameters = [op.id for op in inside if op.opcode == "parameter"]
        return len(inside) == len(parameters) + 1 and list(wrapped.operand_ids) == parameters

    def _wrapped(self, computation: int) -> Any:
        """What a computation that runs asynchronously wraps."""
        message = self.computations[computation]
        return next(op for op in message.instructions if op.id == message.root_id)

    def instructions(self, computation: Any) -> Iterator[Instruction]:
        """A computation's instructions, in the order of the schedule."""
        by_id = {op.id: op for op in computation.instructions}
        name_of = {op_id: op.name for op_id, op in by_id.items()}
        for op_id in self.schedule.get(computation.id) or by_id:  # XLA:TPU has empty ones
            op = by_id[op_id]
            message, opcode = op, op.opcode
            if opcode in ("async-start", "async-update", "async-done"):
                start = op
                while start.opcode != "async-start":
                    start = by_id[start.operand_ids[0]]
                if start.called_computation_ids[0] in self.wrappers:
                    wrapped = self._wrapped(start.called_computation_ids[0])
                    opcode = f"{wrapped.opcode}{opcode.removeprefix('async')}"
                    message = wrapped if op is start else op
            yield Instruction(
                op.name,
                opcode,
                shape_of(op.shape),
                tuple([name_of[operand] for operand in op.operand_ids]),
                tuple([self.computations[called].name for called in in_order(message)]),
                tuple([name_of[predecessor] for predecessor in op.control_predecessor_ids]),
                op_id == computation.root_id,
                message,
                None if message is op else op,
                count_trips(op, by_id, self.computations) if _hides_trips(op) else None,
            )


def in_order(message: Any) -> Sequence[int]:
    """What an instruction calls; of a loop, XLA has the body first, and here the condition comes
    first, as it runs.
    """
    called = message.called_computation_ids
    return called[::-1] if message.opcode == "while" else called


def with_blocks(module: Module, body: Computation) -> Iterator[Computation]:
    """A computation, the bodies and conditions of its loops, the branches of its conditionals, and
    what it calls.
    """
    yield body
    for op in body.ops.values():
        if op.opcode in BLOCKS:
            for name in op.called:
                yield from with_blocks(module, module[name])


def _is_large_constant(message: Any) -> bool:
    if message.opcode != "constant":
        return False
    return sum(leaf.nbytes for leaf in leaves(shape_of(message.shape))) >= LARGE_NBYTES


def _hides_trips(message: Any) -> bool:
    """Is it a loop whose trips XLA does not say?"""
    return message.opcode == "while" and b"known_trip_count" not in message.backend_config


def _copy_of(message: Any) -> Any:
    copied = InstructionMessage()
    copied.CopyFrom(message)
    return copied


def _set_attributes(message: Any, attributes: Mapping[str, str]) -> None:
    del message.frontend_attributes.map[:]
    for key, value in attributes.items():
        message.frontend_attributes.map.add(key=key, value=value)


def _digest(lines: Iterable[str]) -> str:
    """Digest of lines, with constants named by the order of their first use."""
    order: dict[str, str] = {}
    text = _NUMBERED_CONSTANT.sub(
        lambda name: order.setdefault(name[0], f"constant#{len(order)}"), "\n".join(lines)
    )
    return hashlib.sha256(text.encode()).hexdigest()
