"""The messages of a serialized HloModuleProto, as far as memplan reads them; other fields are kept
and written back.

Names and numbers of fields are those of XLA's `hlo.proto` and `xla_data.proto`, which promise not
to change them. google.protobuf keeps fields that a message type does not declare.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

from memplan.errors import MemplanError

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "uint": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
# Message -> fields: "name number type", where the type is a scalar or a message, with a star if it
# is repeated.
_MESSAGES = {
    "Tile": "dimensions 1 int*",
    "Layout": """
        minor_to_major 1 int*; tiles 6 Tile*; element_size_in_bits 7 int; memory_space 8 int
        tail_padding_alignment_in_elements 16 int
    """,
    "Shape": """
        element_type 2 int32; dimensions 3 int*; tuple_shapes 4 Shape*; layout 5 Layout
        is_dynamic_dimension 6 bool*
    """,
    "Metadata": "op_type 1 string; op_name 2 string; stack_frame_id 15 int32",
    "WindowDimension": """
        size 1 int; stride 2 int; padding_low 3 int; padding_high 4 int; window_dilation 5 int
        base_dilation 6 int
    """,
    "Window": "dimensions 1 WindowDimension*",
    "ConvolutionDimensions": """
        kernel_input_feature_dimension 3 int; kernel_output_feature_dimension 4 int
        kernel_spatial_dimensions 6 int*; input_batch_dimension 7 int; input_feature_dimension 8 int
        input_spatial_dimensions 11 int*
    """,
    "DotDimensions": """
        lhs_contracting_dimensions 1 int*; rhs_contracting_dimensions 2 int*
        lhs_batch_dimensions 3 int*; rhs_batch_dimensions 4 int*
    """,
    "SliceDimension": "start 1 int; limit 2 int; stride 3 int",
    "PaddingDimension": "edge_padding_low 1 int; edge_padding_high 2 int; interior_padding 3 int",
    "PaddingConfig": "dimensions 1 PaddingDimension*",
    "ReplicaGroup": "replica_ids 1 int*",
    "IotaGroups": """
        num_replica_groups 1 int; num_devices_per_group 2 int; iota_reshape_dims 3 int*
        iota_transpose_perm 4 int32*
    """,
    "SubAxis": "pre_size 1 int; size 2 int",
    "AxisRef": "mesh_axis_index 1 int; sub_axis_info 2 SubAxis",
    "MeshAxis": "name 1 string; size 2 int",
    "IotaTransform": "reshape_dims 1 int*; transpose_perm 2 int*",
    "Mesh": "axes 1 MeshAxis*; device_ids 2 int*; iota_transform 3 IotaTransform",
    "MeshGroups": "mesh 1 Mesh; axes 2 AxisRef*",
    "DeviceList": "replica_groups 1 ReplicaGroup*; iota_replica_group_list 2 IotaGroups",
    "SourceTarget": "source 1 int; target 2 int",
    "OutputAlias": "output_shape_index 1 int*; operand_index 2 int; operand_shape_index 3 int*",
    "FrontendAttribute": "key 1 string; value 2 string",
    "FrontendAttributes": "map 1 FrontendAttribute*",
    "Literal": """
        shape 1 Shape; preds 2 bool*; u8s 3 bytes; s32s 4 int32*; s64s 5 int*; u32s 6 uint32*
        u64s 7 uint*; f32s 8 float*; f64s 9 double*; f16s 11 bytes; c64s 12 float*; bf16s 13 bytes
        s8s 15 bytes; u16s 16 bytes; s16s 17 bytes; c128s 18 double*; f8e5m2s 19 bytes
        f8e4m3fns 20 bytes; s4s 21 bytes; u4s 22 bytes; f8e4m3b11fnuzs 23 bytes
        f8e5m2fnuzs 24 bytes; f8e4m3fnuzs 25 bytes; s2s 26 bytes; u2s 27 bytes; f8e4m3s 28 bytes
        f8e3m4s 29 bytes; s1s 30 bytes; u1s 31 bytes; f4e2m1fns 32 bytes; f8e8m0fnus 33 bytes
        f6e3m2fns 35 bytes; f6e2m3fns 36 bytes
    """,
    "Instruction": """
        name 1 string; opcode 2 string; shape 3 Shape; metadata 7 Metadata; literal 8 Literal
        parameter_number 9 int; fusion_kind 11 string; tuple_index 13 int; dimensions 14 int*
        window 15 Window; convolution_dimension_numbers 16 ConvolutionDimensions
        slice_dimensions 17 SliceDimension*; dynamic_slice_sizes 20 int*
        padding_config 21 PaddingConfig; channel_id 26 int; custom_call_target 28 string
        fft_length 32 int*
        dot_dimension_numbers 30 DotDimensions; id 35 int; operand_ids 36 int*
        control_predecessor_ids 37 int*; called_computation_ids 38 int*; sharding 40 bytes
        backend_config 43 bytes; replica_groups 49 ReplicaGroup*; feature_group_count 50 int
        source_target_pairs 52 SourceTarget*; batch_group_count 58 int
        custom_call_has_side_effect 65 bool; frontend_attributes 68 FrontendAttributes
        use_global_device_ids 71 bool; output_operand_aliasing 74 OutputAlias*
        collective_device_list 87 DeviceList; iota_collective_device_list 92 IotaGroups
        mesh_axes_replica_group_list 93 MeshGroups
    """,
    "ProgramShape": "parameters 1 Shape*; result 2 Shape; parameter_names 3 string*",
    "Computation": """
        name 1 string; instructions 2 Instruction*; program_shape 4 ProgramShape; id 5 int
        root_id 6 int; is_fusion_computation 7 bool
    """,
    "Sequence": "instruction_ids 1 int*",
    "ScheduleEntry": "key 1 int; value 2 Sequence",
    "Schedule": "sequences 1 ScheduleEntry*",
    "AliasEntry": """
        output_shape_index 1 int*; parameter_number 2 int; parameter_shape_index 3 int*
        kind 4 int32
    """,
    "Aliases": "entries 1 AliasEntry*",
    "FileLocation": "file_name_id 1 int32; function_name_id 2 int32; line 3 int32",
    "StackFrame": "file_location_id 1 int32; parent_frame_id 2 int32",
    "StackFrames": """
        file_names 1 string*; function_names 2 string*; file_locations 3 FileLocation*
        stack_frames 4 StackFrame*
    """,
    "Module": """
        name 1 string; entry_computation_name 2 string; computations 3 Computation*; id 5 int
        entry_computation_id 6 int; schedule 7 Schedule; input_output_alias 8 Aliases
        spmd_output_sharding 12 bytes; profile_info 13 bytes*; spmd_parameters_shardings 14 bytes*
        device_assignment 15 bytes; stack_frame_index 17 StackFrames
        frontend_attributes 19 FrontendAttributes
    """,
}  # fmt: skip


class UnreadableModuleError(MemplanError, ValueError):
    """A module that is not as this version of memplan knows modules."""


# An instruction's id is its computation's, shifted by so many bits, and a number of its own.
LOCAL_BITS = 32
# Fields of an instruction that XLA of jax 0.12 has. A later one may change what others mean.
_LAST_FIELD = 102
_OPCODES = frozenset(
    """
    abs acos acosh add add-dependency after-all all-gather all-gather-done all-gather-start
    all-reduce all-reduce-done all-reduce-start all-to-all and asin asinh async-done async-start
    async-update atan2 atanh batch-norm-grad batch-norm-inference batch-norm-training bitcast
    bitcast-convert broadcast call cbrt ceil cholesky clamp collective-broadcast
    collective-permute collective-permute-done collective-permute-start compare complex
    concatenate conditional constant convert convolution copy copy-done copy-start cosh cosine
    count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
    get-dimension-size get-tuple-element imag infeed iota is-finite log log-plus-one logistic
    map maximum minimum mulhi multiply negate not opt-barrier or outfeed pad parameter
    partition-id popcnt power ragged-all-to-all ragged-dot real recv recv-done reduce
    reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng
    rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt
    scaled-dot scan scatter select select-and-scatter send send-done set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt
    stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905
)


def unreadable(op: Any, computation: int) -> str:
    """Why an instruction's message cannot be read; "" if it can.

    Args:
      computation: the id of its computation.
    """
    if op.id >> LOCAL_BITS != computation:
        return f"it has the id {op.id}, and its computation {computation}"
    if op.opcode not in _OPCODES:
        return f"its opcode is {op.opcode}"
    fields = [
        field.field_number for field in UnknownFieldSet(op) if field.field_number > _LAST_FIELD
    ]
    return f"it has the field {fields[0]}" if fields else ""


def _message_classes() -> dict[str, Any]:
    package = "memplan.hlo"
    file = descriptor_pb2.FileDescriptorProto(
        name="memplan/hlo.proto", package=package, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for declaration in fields.replace("\n", ";").split(";"):
            if not declaration.strip():
                continue
            field, number, kind = declaration.split()
            scalar = _SCALARS.get(kind.rstrip("*"), _Field.TYPE_MESSAGE)
            label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
            declared = message.field.add(name=field, number=int(number), type=scalar, label=label)
            if scalar == _Field.TYPE_MESSAGE:
                declared.type_name = f".{package}.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _message_classes()
ModuleMessage = _CLASSES["Module"]
ComputationMessage = _CLASSES["Computation"]
InstructionMessage = _CLASSES["Instruction"]
ShapeMessage = _CLASSES["Shape"]
LiteralMessage = _CLASSES["Literal"]
