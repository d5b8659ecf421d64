"""A scheduled module -> one whose loops copy slices of host memory by DMA, even if XLA would use kernels.

XLA:GPU annotates a slice whose offset is linear in a loop's counter (`dynamic_slice_config`), and makes a memcpy of a
fusion that only slices. In jax 0.12 this pass, FusionDynamicMemcpyRewriter, is in a pipeline that runs from compute
capability 8.0 on, because of Triton; the memcpy itself needs no capability. For older GPUs the fusion is written here
as that pass would write it.
"""

from collections.abc import Iterator

from memplan.hardware.device import Device
from memplan.xla.async_pairs import IN_STREAM, OUT_STREAM
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.shapes import shape_text

_XLA_COPIES = (8, 0)  # compute capability
_ANNOTATION = '"dynamic_slice_config":'
_KIND = '"fusion_backend_config":{"kind":"__custom_fusion","custom_fusion_config":{"name":"dynamic_slice_fusion"}}'
_CONFIG = "backend_config={"


def copy_slices(module: Module, device: Device) -> Module:
    """The module with annotated slices of host memory as copies, one stream per direction; itself if it has none."""
    if device.target is None:
        return module
    texts, custom = dict(module.texts), device.target.compute_capability < _XLA_COPIES
    for body in module.values():
        found = {op.name: module[op.called[0]] for op in _transfers(body) if is_annotated(module, op)}
        if found:
            lines = (_written(op, custom) if op.name in found else op.line for op in body.ops.values())
            texts[body.name] = body.text_with(lines)
            if custom:
                texts.update((fused.name, fused.text_with(_with_copy(fused))) for fused in found.values())
    return module.with_texts(texts) if texts != module.texts else module


def is_copy(module: Module, op: Instruction, device: Device) -> bool:
    """Is a transfer between device and host a copy, rather than a kernel of XLA that accesses host memory?"""
    if op.opcode in ("copy", "copy-start"):
        return True
    copies = "kind=kCustom" in op.attributes or (device.target and device.target.compute_capability >= _XLA_COPIES)
    return bool(copies) and is_annotated(module, op)


def transfers(module: Module, loop: Instruction, device: Device) -> tuple[int, int]:
    """Transfers between device and host in a trip of a loop: copies, and kernels."""
    bodies = [body for name in loop.called for body in with_blocks(module, module[name])]
    copied = [is_copy(module, op, device) for body in bodies for op in _transfers(body)]
    return sum(copied), len(copied) - sum(copied)


def _transfers(body: Computation) -> Iterator[Instruction]:
    """A transfer between device and host."""
    for op in body.ops.values():
        if op.opcode in ("fusion", "fusion-start", "copy-start"):
            touched = (*op.result, *(array for name in op.operands for array in body.ops[name].result))
            if any(array.on_host for array in touched):
                yield op


def is_annotated(module: Module, op: Instruction) -> bool:
    """Is it a fusion with only an annotated slice?"""
    if not op.opcode.startswith("fusion"):
        return False
    fused = module[op.called[0]].ops.values()
    slices = [one for one in fused if one.opcode in ("dynamic-slice", "dynamic-update-slice")]
    return {one.opcode for one in fused} <= _MOVES and len(slices) == 1 and _ANNOTATION in slices[0].attributes


_MOVES = {"parameter", "constant", "bitcast", "copy", "dynamic-slice", "dynamic-update-slice"}


def _written(op: Instruction, custom: bool) -> str:
    """A fusion on the stream of its direction, and one that XLA's emitter of dynamic slices accepts."""
    out = op.result[-2 if op.opcode.endswith("-start") else 0].on_host
    line = op.line if "frontend_attributes" in op.attributes else f"{op.line}, {OUT_STREAM if out else IN_STREAM}"
    if not custom:
        return line
    line = line.replace("kind=kLoop", "kind=kCustom", 1)
    if _CONFIG in line:
        return line.replace(_CONFIG, f"{_CONFIG}{_KIND},", 1)
    return f"{line}, {_CONFIG}{_KIND}}}"


def _with_copy(fused: Computation) -> Iterator[str]:
    """Lines of a fusion with a copy of the slice's result, or of the update slice's update."""
    for op in fused.ops.values():
        if op.opcode == "dynamic-update-slice":
            update = fused.ops[op.operands[1]]
            yield f"  %{update.name}.copied = {shape_text(update.shape)} copy(%{update.name})"
            yield op.line_with(op.name, [op.operands[0], f"{update.name}.copied", *op.operands[2:]])
        elif op.root:
            yield op.line.replace("ROOT ", "", 1)
            yield f"  ROOT %{op.name}.copied = {shape_text(op.shape)} copy(%{op.name})"
        else:
            yield op.line
