"""Asynchronous pairs in a form that XLA reads back.

XLA:GPU prints an `async-start` of an all-reduce as an `all-reduce-start` with the attributes of both, and reads this as
the older instruction of that name, which has another shape (XLA of jax 0.12, `HloPrintOptions`' sugar for asynchronous
instructions). Here each pair gets its computation back.
"""

from collections.abc import Iterator

from memplan.xla.module import Computation, Instruction, read_instruction
from memplan.xla.shapes import Array, shape_text

# Frontend attributes that give the copies of each direction their own stream. XLA of jax 0.11 assigns copies to four
# streams in turn, so that a prefetch may wait for an offload. XLA of jax 0.12 does so by itself, except for
# `host_copies`.
OUT_STREAM = {"_xla_stream_annotation": "0"}
IN_STREAM = {"_xla_stream_annotation": "1"}
_PAIR_ATTRIBUTES = (
    "output_to_operand_aliasing", "metadata", "backend_config", "control-predecessors", "frontend_attributes"
)  # fmt: skip


def expand_async_pairs(text: str) -> str:
    """The module with a computation for every asynchronous pair that is printed without one."""
    found: list[str] = []
    begun: set[str] = set()
    head = 0  # of the computation that the line is in
    for line in text.split("\n"):
        if line.startswith(("%", "ENTRY")):
            head = len(found)
        if " = ((" in line and "-start(" in line:
            op = read_instruction(line)
            if op.opcode not in ("async-start", "copy-start"):
                begun.add(op.name)
                found[head:head] = [_computation(op), ""]
                line = _async_start(op)
        elif begun and "-done(%" in line and (op := read_instruction(line)).operands[0] in begun:
            line = line.replace(f" {op.opcode}(", " async-done(", 1)
        found.append(line)
    return "\n".join(found)


def _async_start(op: Instruction) -> str:
    given = ", ".join(f"%{operand}" for operand in op.operands)
    own = ", ".join([f"calls=%{op.name}.computation", *(one for one in _split(op.attributes) if _is_of_pair(one))])
    return f"  {'ROOT ' if op.root else ''}%{op.name} = {shape_text(op.shape)} async-start({given}), {own}"


def _computation(op: Instruction) -> str:
    assert not isinstance(op.shape, Array)
    operands, result, *_ = op.shape
    assert not isinstance(operands, Array)
    given = [(f"{op.name}.operand.{number}", shape) for number, shape in enumerate(operands)]
    made = f"{op.opcode.removesuffix('-start')}({', '.join(f'%{name}' for name, _ in given)})"
    attributes = (one for one in _split(op.attributes) if not _is_of_pair(one))
    root = f"  ROOT %{op.name}.result = {shape_text(result)} {', '.join([made, *attributes])}"
    return Computation.fused(f"{op.name}.computation", given, [read_instruction(root)]).text


def _is_of_pair(attribute: str) -> bool:
    return attribute.startswith(_PAIR_ATTRIBUTES) and '"fusion_backend_config"' not in attribute


def _split(attributes: str) -> Iterator[str]:
    """Split at commas outside of brackets and quotes."""
    depth, begun, quoted = 0, 0, False
    for at, sign in enumerate(attributes):
        if sign == '"' and attributes[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (sign in "({[") - (sign in ")}]")
            if sign == "," and not depth:
                yield attributes[begun:at].strip()
                begun = at + 1
    if attributes[begun:].strip():
        yield attributes[begun:].strip()
