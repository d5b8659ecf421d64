"""A scheduled module -> one whose loops copy slices of host memory by DMA, also where XLA would have kernels do it.

XLA:GPU annotates a slice whose offset is linear in a loop's counter (`dynamic_slice_config`), and makes a memcpy of a
fusion that does nothing else. In jax 0.12 that pass, FusionDynamicMemcpyRewriter, is one of a pipeline that runs from
compute capability 8.0 on, for the sake of Triton. The memcpy itself asks for no capability. For older GPUs the fusion
is written here as that pass would.
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.hardware.device import Device
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import shape_text

_XLA_COPIES = (8, 0)  # compute capability
_ANNOTATION = '"dynamic_slice_config":'
_KIND = '"fusion_backend_config":{"kind":"__custom_fusion","custom_fusion_config":{"name":"dynamic_slice_fusion"}}'
_CONFIG = "backend_config={"


def copy_slices(module: Module, device: Device) -> Module:
    """The module with its annotated slices of host memory as copies; itself where XLA sees to that."""
    if device.target is None or device.target.compute_capability >= _XLA_COPIES:
        return module
    texts = dict(module.texts)
    for body in module.values():
        found = {op.name: module[op.called[0]] for op in body.ops.values() if is_slice(module, op)}
        if found:
            lines = (_custom(op) if op.name in found else op.line for op in body.ops.values())
            texts[body.name] = body.text_with(lines)
            texts.update((fused.name, fused.text_with(_with_copy(fused))) for fused in found.values())
    return module.with_texts(texts) if texts != module.texts else module


def is_slice(module: Module, op: Instruction) -> bool:
    """Does a transfer between device and host move an annotated slice, and do nothing else?

    Such a one is a copy, all others are kernels that read and write host memory.
    """
    if op.opcode not in ("fusion", "fusion-start") or not any(array.on_host for array in op.result):
        return False
    fused = module[op.called[0]]
    slicing = [one for one in fused.ops.values() if one.opcode in ("dynamic-slice", "dynamic-update-slice")]
    others = {one.opcode for one in fused.ops.values()} - _NOTHING
    return len(slicing) == 1 and not others and _ANNOTATION in slicing[0].attributes


_NOTHING = {"parameter", "constant", "bitcast", "copy", "dynamic-slice", "dynamic-update-slice"}


def _custom(op: Instruction) -> str:
    """A fusion that XLA's emitter of dynamic slices takes."""
    line = op.line.replace("kind=kLoop", "kind=kCustom", 1)
    if _CONFIG in line:
        return line.replace(_CONFIG, f"{_CONFIG}{_KIND},", 1)
    return f"{line}, {_CONFIG}{_KIND}}}"


def _with_copy(fused: Computation) -> Iterator[str]:
    """What a slice makes, or what it is updated with, is copied."""
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
