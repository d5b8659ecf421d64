"""A scheduled module -> one whose loops copy slices of host memory by DMA, not by kernels of XLA.

XLA:GPU annotates a slice whose offset is linear in a loop's counter (`dynamic_slice_config`), and
makes a memcpy of a fusion that only slices. In jax 0.12 this pass, FusionDynamicMemcpyRewriter, is
in a pipeline that runs from compute capability 8.0 on, because of Triton; the memcpy itself needs
no capability. For older GPUs the fusion is written here as that pass would write it.
"""

import json
from collections.abc import Iterator

from memplan.hardware.device import Device
from memplan.xla.edit import Edit, copy
from memplan.xla.module import Computation, Instruction, Module, with_blocks

# Frontend attributes that give the copies of each direction their own stream. XLA of jax 0.11
# assigns copies to four streams in turn, so that a prefetch may wait for an offload. XLA of jax
# 0.12 gives each direction its own by itself, except for copies of slices.
OUT_STREAM = {"_xla_stream_annotation": "0"}
IN_STREAM = {"_xla_stream_annotation": "1"}
_XLA_COPIES = (8, 0)  # XLA itself makes copies from this compute capability on
# A slice is annotated if its back end's configuration contains this.
_ANNOTATION = '"dynamic_slice_config":'
# Configuration of a fusion that XLA's emitter of dynamic slices takes.
_COPY_FUSION = {
    "kind": "__custom_fusion",
    "custom_fusion_config": {"name": "dynamic_slice_fusion"},
}


def copy_slices(module: Module, device: Device) -> Module:
    """The module with annotated slices of host memory as copies, one stream per direction.

    Returns:
      The module itself if it has none.
    """
    if not device.backend.has_own_memory:
        return module
    is_custom = device.compute_capability < _XLA_COPIES
    edit = Edit(module)
    for body in module.values():
        slices = {op.name for op in _transfers(body) if is_annotated(module, op)}
        ops = [_as_copy(op, is_custom) if op.name in slices else op for op in body.ops.values()]
        if any(new is not op for new, op in zip(ops, body.ops.values(), strict=True)):
            edit.replace(body.with_ops(ops))
        for name in slices if is_custom else ():
            fused = module[body.ops[name].called[0]]
            edit.replace(fused.with_ops(_with_copy(fused)))
    return edit.module


def is_copy(module: Module, op: Instruction, device: Device) -> bool:
    """Is a transfer between device and host a copy, not a kernel that accesses host memory?"""
    if op.opcode in ("copy", "copy-start"):
        return True
    if not is_annotated(module, op):
        return False
    if op.kind == "kCustom":
        return True
    return device.compute_capability >= _XLA_COPIES


def transfers(module: Module, loop: Instruction, device: Device) -> tuple[int, int]:
    """Transfers between device and host in a trip of a loop: copies, and kernels."""
    bodies = [body for name in loop.called for body in with_blocks(module, module[name])]
    are_copies = [is_copy(module, op, device) for body in bodies for op in _transfers(body)]
    return sum(are_copies), len(are_copies) - sum(are_copies)


def _transfers(body: Computation) -> Iterator[Instruction]:
    """A transfer between device and host."""
    for op in body.ops.values():
        if op.opcode in ("fusion", "fusion-start", "copy-start"):
            operands = (array for name in op.operands for array in body.ops[name].result)
            if any(array.on_host for array in (*op.result, *operands)):
                yield op


def is_annotated(module: Module, op: Instruction) -> bool:
    """Is it a fusion with only an annotated slice?"""
    if not op.opcode.startswith("fusion"):
        return False
    ops = module[op.called[0]].ops.values()
    slices = [inner_op for inner_op in ops if inner_op.opcode in _SLICES]
    if len(slices) != 1 or any(inner_op.opcode not in _MOVES for inner_op in ops):
        return False
    return _ANNOTATION in slices[0].backend_config


# Opcodes of a fusion that moves a slice and computes nothing.
_SLICES = {"dynamic-slice", "dynamic-update-slice"}
_MOVES = {"parameter", "constant", "bitcast", "copy"} | _SLICES


def _as_copy(op: Instruction, is_custom: bool) -> Instruction:
    """A fusion on the stream of its direction.

    Args:
      is_custom: make it one that XLA's emitter of dynamic slices accepts.
    """
    target = op.result[-2 if op.opcode.endswith("-start") else 0]
    stream = OUT_STREAM if target.on_host else IN_STREAM
    streamed = op if op.frontend_attributes else op.changed(frontend_attributes=stream)
    if not is_custom:
        return streamed
    config = {"fusion_backend_config": _COPY_FUSION, **json.loads(op.backend_config or "{}")}
    text = json.dumps(config, separators=(",", ":"))
    return streamed.changed(kind="kCustom", backend_config=text)


def _with_copy(fused: Computation) -> Iterator[Instruction]:
    """A fusion's instructions with a copy of the slice's result, or of an update slice's update."""
    for op in fused.ops.values():
        if op.opcode == "dynamic-update-slice":
            target, update_name, *offsets = op.operands
            update = fused.ops[update_name]
            copied = copy(f"{update.name}.copied", update.shape, update.name)
            yield copied
            yield op.changed(operands=[target, copied.name, *offsets])
        elif op.root:
            yield op.changed(root=False)
            yield copy(f"{op.name}.copied", op.shape, op.name, root=True)
        else:
            yield op
