"""The cost of the kernels of a scheduled module: bytes of device and host memory, FLOPs of matrix work.

A kernel reads its operands and writes its results once; of a sliced operand it reads the slice, of a buffer updated in
place it writes the update.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # updated in place: opcode -> position of the update

_TARGET = re.compile(r'custom_call_target="([^"]*)')
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)')
_FILTER_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_DILATION = re.compile(r"\blhs_dilate=([\dx]+)")
_BATCH_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Bytes and FLOPs of one run of a kernel."""

    device_nbytes: int  # of device memory, read and written
    # in_nbytes, out_nbytes: read from host memory, written to it
    in_nbytes: int
    out_nbytes: int
    flops: float  # of matrix products and convolutions
    dtype: str  # numpy name of their operands' type; "" if there are none

    @property
    def is_host_copy(self) -> bool:
        return self.in_nbytes > 0 or self.out_nbytes > 0


def kernel_cost(module: Module, body: Computation, op: Instruction) -> KernelCost:
    """The cost of an instruction that is a kernel in `body`."""
    device = from_host = to_host = 0
    for name in dict.fromkeys(op.operands):
        operand = body.ops[name]
        reads = (_read(module, body, op, i, False) for i, other in enumerate(op.operands) if other == name)
        nbytes = min(operand.nbytes, sum(reads))
        if any(array.on_host for array in operand.result):
            from_host += nbytes
        else:
            device += nbytes
    for nbytes, on_host in _written(module, body, op):
        if on_host:
            to_host += nbytes
        else:
            device += nbytes
    return KernelCost(device, from_host, to_host, *_matrix_work(module, body, op))


def _fused_in(module: Module, op: Instruction) -> Computation | None:
    return module[op.called[0]] if op.opcode in ("fusion", "async") else None


def _read(module: Module, body: Computation, op: Instruction, position: int, fused: bool) -> int:
    """Bytes of its operand at `position` that an instruction reads, in a fusion or as a kernel."""
    if op.opcode == "bitcast" and not op.root:
        return _read_by_all(module, body, op)
    if position == 0 and op.opcode in _UPDATES and _updates_in_place(body, op, fused):
        return _update_of(body, op).nbytes if op.opcode == "scatter" else 0  # it adds to the old value
    operand = body.ops[op.operands[position]]
    if position == 0 and op.opcode in _SLICES:
        return min(operand.nbytes, op.nbytes)
    if called := _fused_in(module, op):
        return _read_by_all(module, called, called.parameters[position])
    return operand.nbytes


def _read_by_all(module: Module, fused: Computation, value: Instruction) -> int:
    """Bytes of a value that the instructions of a fusion read."""
    if value.root:
        return value.nbytes
    nbytes = 0
    for op, position in fused.uses[value.name]:
        nbytes += _read(module, fused, op, position, True)
        if nbytes >= value.nbytes:
            return value.nbytes
    return nbytes


def _written(module: Module, body: Computation, op: Instruction) -> list[tuple[int, bool]]:
    """Bytes of every array that a kernel writes and whether it is on the host, without libraries' workspace."""
    called = _fused_in(module, op)
    where, makers = (called, _makers(called)) if called else (body, (op,))
    arrays = [written for maker in makers for written in _written_by(where, maker, called is not None)]
    library = op.opcode == "custom-call" or "kind=kCustom" in op.attributes
    has_workspace = library and len(arrays) > 1 and _is_workspace(arrays[-1][0])
    return [(array.nbytes, on_host) for array, on_host in (arrays[:-1] if has_workspace else arrays)]


def _written_by(body: Computation, maker: Instruction, fused: bool) -> Iterator[tuple[Array, bool]]:
    """Arrays that an instruction writes, and whether they are on the host."""
    if maker.opcode in _UPDATES and _updates_in_place(body, maker, fused):
        yield _update_of(body, maker), maker.result[0].on_host
    else:
        yield from ((array, array.on_host) for array in maker.result)


def _is_workspace(array: Array) -> bool:
    return array.dtype in ("s8", "u8") and len(array.dims) == 1


def _makers(fused: Computation) -> tuple[Instruction, ...]:
    """The instructions that make the results."""
    return tuple(map(fused.behind_bitcasts, fused.results))


def _updates_in_place(body: Computation, op: Instruction, fused: bool) -> bool:
    """Is it updated in place? A separate update always is; one in a fusion, if it returns the updated parameter."""
    if not fused:
        return True
    updated = body.behind_bitcasts(body.ops[op.operands[0]])
    return updated.opcode == "parameter" and any(maker is op for maker in _makers(body))


def _update_of(body: Computation, op: Instruction) -> Array:
    return body.ops[op.operands[_UPDATES[op.opcode]]].result[0]


def matrix_flops(module: Module, body: Computation, op: Instruction) -> float:
    """FLOPs of matrix products and convolutions in an instruction."""
    return _matrix_work(module, body, op)[0]


def _matrix_work(module: Module, body: Computation, op: Instruction) -> tuple[float, str]:
    """FLOPs of matrix products and convolutions in a kernel, and the numpy name of their operands' type."""
    if called := _fused_in(module, op):
        parts = [_matrix_work(module, called, inner) for inner in called.ops.values()]
        return sum(flops for flops, _ in parts), next((dtype for _, dtype in parts if dtype), "")
    target = _TARGET.search(op.attributes) if op.opcode == "custom-call" else None
    rule = _rule(target[1] if target else op.opcode)
    if rule is None:
        return 0.0, ""
    left, right = (body.ops[name].result[0] for name in op.operands[:2])
    return rule(left, right, op.result[0], op.attributes), left.numpy_name


def _dot_flops(left: Array, right: Array, result: Array, attributes: str) -> float:
    found = _CONTRACTED.search(attributes)
    axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else []
    return 2.0 * result.size * math.prod(left.dims[axis] for axis in axes)


def _conv_flops(image: Array, kernel: Array, result: Array, attributes: str) -> float:
    """`result` is the output of the forward convolution; products with the zeros of a dilated input are not counted."""
    labels, dilation, groups = (p.search(attributes) for p in (_FILTER_LABELS, _DILATION, _BATCH_GROUPS))
    features = kernel.dims[labels[1].index("o")] if labels else 1
    skipped = math.prod(map(int, dilation[1].split("x"))) if dilation else 1
    return 2.0 * result.size * kernel.size / features / skipped / (int(groups[1]) if groups else 1)


_Rule = Callable[[Array, Array, Array, str], float]
_FLOPS: dict[str, _Rule] = {
    "dot": _dot_flops,
    "__cublas$": _dot_flops,
    "convolution": _conv_flops,
    "__cudnn$convBackwardInput": lambda dy, kernel, dx, attributes: _conv_flops(dx, kernel, dy, attributes),
    "__cudnn$convBackwardFilter": lambda x, dy, kernel, attributes: _conv_flops(x, kernel, dy, attributes),
    "__cudnn$conv": _conv_flops,
}


@functools.lru_cache(maxsize=256)
def _rule(kind: str) -> _Rule | None:
    """The FLOPs rule of an opcode or a library call."""
    return next((rule for begin, rule in _FLOPS.items() if kind.startswith(begin)), None)
