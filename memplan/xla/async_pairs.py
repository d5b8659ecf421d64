"""Asynchronous pairs in a form that XLA reads back.

XLA:GPU prints an `async-start` of an all-reduce as an `all-reduce-start` with the attributes of
both, and reads this as the older instruction of that name, which has another shape (XLA of jax
0.12, `HloPrintOptions`' sugar for asynchronous instructions). Here each pair gets its computation
back.
"""

from collections.abc import Iterator

from memplan.xla.module import Computation, Instruction, read_instruction
from memplan.xla.shapes import Array, shape_text

# Frontend attributes that give the copies of each direction their own stream. XLA of jax 0.11
# assigns copies to four streams in turn, so that a prefetch may wait for an offload. XLA of jax
# 0.12 gives each direction its own by itself, except for `host_copies`.
OUT_STREAM = {"_xla_stream_annotation": "0"}
IN_STREAM = {"_xla_stream_annotation": "1"}
# Attributes with these names belong to the pair, all others to what it does asynchronously.
_PAIR_ATTRIBUTES = (
    "output_to_operand_aliasing",
    "metadata",
    "backend_config",
    "control-predecessors",
    "frontend_attributes",
)


def expand_async_pairs(text: str) -> str:
    """The module with a computation for every asynchronous pair that is printed without one."""
    lines: list[str] = []
    starts: set[str] = set()
    head = 0  # of the computation that the line is in
    for line in text.split("\n"):
        if line.startswith(("%", "ENTRY")):
            head = len(lines)
        if " = ((" in line and "-start(" in line:
            op = read_instruction(line)
            if op.opcode not in ("async-start", "copy-start"):
                starts.add(op.name)
                lines[head:head] = [_computation(op), ""]
                line = _async_start(op)
        elif starts and "-done(%" in line:
            op = read_instruction(line)
            if op.operands[0] in starts:
                line = line.replace(f" {op.opcode}(", " async-done(", 1)
        lines.append(line)
    return "\n".join(lines)


def _async_start(op: Instruction) -> str:
    operands = ", ".join(f"%{operand}" for operand in op.operands)
    pair_attributes = filter(_is_of_pair, _split(op.attributes))
    attributes = ", ".join([f"calls=%{op.name}.computation", *pair_attributes])
    root = "ROOT " if op.root else ""
    shape = shape_text(op.shape)
    return f"  {root}%{op.name} = {shape} async-start({operands}), {attributes}"


def _computation(op: Instruction) -> str:
    assert not isinstance(op.shape, Array)
    operands, result, *_ = op.shape
    assert not isinstance(operands, Array)
    parameters = [(f"{op.name}.operand.{number}", shape) for number, shape in enumerate(operands)]
    opcode = op.opcode.removesuffix("-start")
    call = f"{opcode}({', '.join(f'%{name}' for name, _ in parameters)})"
    attributes = (attribute for attribute in _split(op.attributes) if not _is_of_pair(attribute))
    line = f"  ROOT %{op.name}.result = {shape_text(result)} {', '.join([call, *attributes])}"
    root = read_instruction(line)
    return Computation.fused(f"{op.name}.computation", parameters, [root]).text


def _is_of_pair(attribute: str) -> bool:
    return attribute.startswith(_PAIR_ATTRIBUTES) and '"fusion_backend_config"' not in attribute


def _split(attributes: str) -> Iterator[str]:
    """Split at commas outside of brackets and quotes."""
    depth = 0
    begin = 0
    is_quoted = False
    for position, sign in enumerate(attributes):
        if sign == '"' and attributes[position - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (sign in "({[") - (sign in ")}]")
            if sign == "," and not depth:
                yield attributes[begin:position].strip()
                begin = position + 1
    if attributes[begin:].strip():
        yield attributes[begin:].strip()
