"""Scheduled optimized HLO text -> computations, instructions, and the bytes that each instruction moves.

A kernel reads its operands and writes its results once; of a sliced operand it reads the slice, of a buffer updated in
place it writes the update.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.program.hlo import HOST_SPACE

_OP = re.compile(r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<result>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$")
_BODY = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?P<layout>\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_BODIES = re.compile(r"\b(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)=(\{[^}]*\}|%\S+)")

_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place: opcode -> position of what is written
_NUMPY = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True, slots=True)
class Array:
    dtype: str  # HLO's name: f32, bf16, pred
    dims: tuple[int, ...]
    on_host: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(digits[1]) if digits else 8 * (self.dtype == "pred")  # tokens have none
        return -(-self.size * bits // 8)

    @property
    def numpy_name(self) -> str:
        prefix = re.match(r"[a-z]+", self.dtype)
        return _NUMPY.get(prefix[0], prefix[0]) + self.dtype[prefix.end() :] if prefix else self.dtype


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction; `result` has a tuple's leaves in order, `attributes` is what follows the operands."""

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bodies(self) -> list[str]:
        return [name for found in _BODIES.findall(self.attributes) for name in _NAME.findall(found)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.result)


@dataclass(frozen=True)
class Computation:
    """A computation: instruction name -> instruction, in schedule order; one kernel where it is fused."""

    ops: dict[str, Instruction]
    fused: bool = False

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[Instruction, int]]]:
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for position, name in enumerate(op.operands):
                found[name].append((op, position))
        return found

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(op.attributes): op for op in self.ops.values() if op.opcode == "parameter"}

    @cached_property
    def outputs(self) -> tuple[Instruction, ...]:
        """The instructions that make the results."""
        root = next(op for op in self.ops.values() if op.root)
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return tuple(map(self.behind_bitcasts, names))

    def behind_bitcasts(self, name: str) -> Instruction:
        op = self.ops[name]
        return self.behind_bitcasts(op.operands[0]) if op.opcode == "bitcast" else op

    def updates_in_place(self, op: Instruction) -> bool:
        """As a kernel of its own always; in a fusion, where a parameter is updated and returned."""
        if op.opcode not in _UPDATES or not self.fused:
            return op.opcode in _UPDATES
        return self.behind_bitcasts(op.operands[0]).opcode == "parameter" and op in self.outputs

    def update_of(self, op: Instruction) -> Array:
        return self.ops[op.operands[_UPDATES[op.opcode]]].result[0]


Module = Mapping[str, Computation]


def read_module(text: str) -> Module:
    """Computations by name, the entry's also as "ENTRY"."""
    bodies: dict[str, Computation] = {}
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _BODY.match(line):
            current = {}
            bodies["ENTRY" if header["entry"] else header["name"]] = Computation(current)
        elif found := _OP.match(line):
            current[found["name"]] = _read_op(found)
    if "ENTRY" not in bodies or "is_scheduled=true" not in text:
        raise ValueError("This is not scheduled HLO; pass the text of `jax.jit(step).lower(...).compile().as_text()`.")
    return bodies


def _read_op(found: re.Match[str]) -> Instruction:
    operands, _, attributes = re.sub(r"\)(, |$)", "\0", found["rest"], count=1).partition("\0")
    if found["opcode"] in ("parameter", "constant"):
        operands, attributes = "", operands
    arrays = tuple(map(_read_array, _ARRAY.finditer(found["result"])))
    names = tuple(_NAME.findall(operands))
    return Instruction(found["name"], found["opcode"], arrays, names, attributes, bool(found["root"]))


def _read_array(found: re.Match[str]) -> Array:
    dims = tuple(int(side) for side in found["dims"].replace("<=", "").split(",") if side)
    return Array(found["dtype"], dims, f"S({HOST_SPACE})" in (found["layout"] or ""))


def _read_nbytes(module: Module, body: Computation, op: Instruction, position: int) -> int:
    """Bytes of its operand at `position` that an instruction reads; it stands in a fusion or is a kernel."""
    operand = body.ops[op.operands[position]]
    if op.opcode == "bitcast" and not op.root:
        return _read_by_all(module, body, op)
    if position == 0 and body.updates_in_place(op):
        return body.update_of(op).nbytes if op.opcode == "scatter" else 0  # adds to what is there
    if position == 0 and op.opcode in _SLICES:
        return min(operand.nbytes, op.nbytes)
    if called := fused_in(module, op):
        return _read_by_all(module, called, called.parameters[position])
    return operand.nbytes


def _read_by_all(module: Module, body: Computation, value: Instruction) -> int:
    reads = (_read_nbytes(module, body, op, position) for op, position in body.uses[value.name])
    return value.nbytes if value.root else min(value.nbytes, sum(reads))


def fused_in(module: Module, op: Instruction) -> Computation | None:
    return replace(module[op.bodies[0]], fused=True) if op.opcode in ("fusion", "async") else None


def _written(module: Module, body: Computation, op: Instruction) -> list[Array]:
    """What a kernel writes, without the workspace of library calls."""
    called = fused_in(module, op)
    where, makers = (called, called.outputs) if called else (body, (op,))
    arrays: list[Array] = []
    for maker in makers:
        in_place = where.updates_in_place(maker)
        arrays += [replace(where.update_of(maker), on_host=maker.result[0].on_host)] if in_place else maker.result
    library = op.opcode == "custom-call" or "kind=kCustom" in op.attributes
    has_workspace = library and len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8") and len(arrays[-1].dims) == 1
    return arrays[:-1] if has_workspace else arrays


def bytes_moved(module: Module, body: Computation, op: Instruction) -> Counter[str]:
    """Bytes of device memory ("device"), from host memory ("in") and to it ("out")."""
    moved: Counter[str] = Counter()
    for name in dict.fromkeys(op.operands):
        reads = [_read_nbytes(module, body, op, i) for i, operand in enumerate(op.operands) if operand == name]
        nbytes = min(body.ops[name].nbytes, sum(reads))
        moved["in" if any(array.on_host for array in body.ops[name].result) else "device"] += nbytes
    for array in _written(module, body, op):
        moved["out" if array.on_host else "device"] += array.nbytes
    return moved
