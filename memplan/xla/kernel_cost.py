"""The cost of the kernels of a scheduled module: bytes of memory, FLOPs of matrix work, and what
libraries' routines compute.

A kernel reads its operands and writes its results once. It reads only the slice of an operand that
it slices, and writes only the update of a buffer that it updates in place.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memplan.hardware.device import Device
from memplan.hardware.efficiency import PRODUCT, MatrixShape, is_aligned
from memplan.hardware.library_calls import LibraryCall
from memplan.hardware.roofline import kernel_seconds
from memplan.xla.library_calls import library_call
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # In-place opcode -> position of the update.
_INPUT_GRADIENT = "__cudnn$convBackwardInput"
_FILTER_GRADIENT = "__cudnn$convBackwardFilter"
_NO_WORK = (0.0, "", PRODUCT)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Bytes and FLOPs of one run of a kernel."""

    device_nbytes: int  # of device memory, read and written
    in_nbytes: int  # read from host memory
    out_nbytes: int  # written to host memory
    flops: float  # of matrix products and convolutions
    dtype: str  # numpy name of their operands' type; "" if there are none
    shape: MatrixShape  # of the first
    library_calls: tuple[LibraryCall, ...] = ()  # besides matrix products and convolutions

    @property
    def is_host_copy(self) -> bool:
        return self.in_nbytes > 0 or self.out_nbytes > 0


def class_seconds(cost: KernelCost, device: Device) -> float:
    """Seconds of a kernel at the rates that kernels of its class achieve."""
    return kernel_seconds(
        cost.flops, cost.dtype, cost.device_nbytes, device, cost.shape, cost.library_calls
    )


def kernel_cost(module: Module, body: Computation, op: Instruction) -> KernelCost:
    """The cost of an instruction that is a kernel in `body`."""
    device = from_host = to_host = 0
    reads = dict.fromkeys(op.operands, 0)
    for position, name in enumerate(op.operands):
        reads[name] += _read(module, body, op, position, False)
    for name, read_nbytes in reads.items():
        operand = body.ops[name]
        nbytes = min(operand.nbytes, read_nbytes)
        if any(array.on_host for array in operand.result):
            from_host += nbytes
        else:
            device += nbytes
    for nbytes, on_host in _written(module, body, op):
        if on_host:
            to_host += nbytes
        else:
            device += nbytes
    work = _matrix_work(module, body, op)
    calls = tuple(_library_calls(module, body, op))
    return KernelCost(device, from_host, to_host, *work, library_calls=calls)


def _library_calls(module: Module, body: Computation, op: Instruction) -> Iterator[LibraryCall]:
    """What a kernel computes as libraries' routines do, also in a fusion."""
    if called := _fused_in(module, op):
        for inner in called.ops.values():
            yield from _library_calls(module, called, inner)
    elif call := library_call(body, op):
        yield call


def _fused_in(module: Module, op: Instruction) -> Computation | None:
    return module[op.called[0]] if op.opcode in ("fusion", "async") else None


def _read(module: Module, body: Computation, op: Instruction, position: int, fused: bool) -> int:
    """Bytes of its operand at `position` that an instruction reads, in a fusion or as a kernel."""
    if op.opcode == "bitcast" and not op.root:
        return _read_by_all(module, body, op)
    if position == 0 and op.opcode in _UPDATES and _updates_in_place(body, op, fused):
        # A scatter adds to the old value.
        return _update_of(body, op).nbytes if op.opcode == "scatter" else 0
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
    """Bytes of every array that a kernel writes, and whether it is on the host.

    A library's workspace does not count.
    """
    if fused := _fused_in(module, op):
        producers = _producers(fused)
        arrays = [array for producer in producers for array in _arrays(fused, producer, True)]
    else:
        arrays = list(_arrays(body, op, False))
    if _has_workspace(op, [array for array, _ in arrays]):
        arrays.pop()
    return [(array.nbytes, on_host) for array, on_host in arrays]


def results_of(op: Instruction) -> tuple[Array, ...]:
    """What an instruction returns, without a library's workspace."""
    return op.result[:-1] if _has_workspace(op, op.result) else op.result


def _has_workspace(op: Instruction, arrays: Sequence[Array]) -> bool:
    """Is the last of the arrays that a kernel writes a library's workspace?"""
    is_library = op.opcode == "custom-call" or op.kind == "kCustom"
    return is_library and len(arrays) > 1 and _is_workspace(arrays[-1])


def _arrays(body: Computation, op: Instruction, fused: bool) -> Iterator[tuple[Array, bool]]:
    """Arrays that an instruction writes, and whether they are on the host."""
    if op.opcode in _UPDATES and _updates_in_place(body, op, fused):
        yield _update_of(body, op), op.result[0].on_host
    else:
        yield from ((array, array.on_host) for array in op.result)


def _is_workspace(array: Array) -> bool:
    return array.dtype in ("s8", "u8") and len(array.dims) == 1


def _producers(fused: Computation) -> tuple[Instruction, ...]:
    """The instructions that compute the results."""
    return tuple(map(fused.behind_bitcasts, fused.results))


def _updates_in_place(body: Computation, op: Instruction, fused: bool) -> bool:
    """Does it update its operand in place?

    A separate update always does, one in a fusion if the fusion returns the updated parameter.
    """
    if not fused:
        return True
    updated = body.behind_bitcasts(body.ops[op.operands[0]])
    return updated.opcode == "parameter" and any(producer is op for producer in _producers(body))


def _update_of(body: Computation, op: Instruction) -> Array:
    return body.ops[op.operands[_UPDATES[op.opcode]]].result[0]


def matrix_flops(module: Module, body: Computation, op: Instruction) -> float:
    """FLOPs of matrix products and convolutions in an instruction."""
    return _matrix_work(module, body, op)[0]


def _matrix_work(
    module: Module, body: Computation, op: Instruction
) -> tuple[float, str, MatrixShape]:
    """FLOPs of a kernel's matrix products and convolutions, the numpy name of their type, and the
    shape of the first.
    """
    if called := _fused_in(module, op):
        parts = [_matrix_work(module, called, inner) for inner in called.ops.values()]
        flops = sum(flops for flops, _, _ in parts)
        _, dtype, shape = next((part for part in parts if part[1]), _NO_WORK)
        return flops, dtype, shape
    rule = _rule(op.target or op.opcode)
    if rule is None:
        return _NO_WORK
    lhs, rhs = (body.ops[name].result[0] for name in op.operands[:2])
    result = op.result[0]
    shape = _convolution_shape(op, lhs, rhs, result) if op.filter_labels else PRODUCT
    return rule(op, lhs, rhs, result), lhs.numpy_name, shape


def _convolution_shape(op: Instruction, lhs: Array, rhs: Array, result: Array) -> MatrixShape:
    """The shape of a convolution's implicit product."""
    is_filter_gradient = op.target.startswith(_FILTER_GRADIENT)
    is_input_gradient = op.target.startswith(_INPUT_GRADIENT)
    kernel = result if is_filter_gradient else rhs
    features = kernel.dims[op.filter_labels.index("o")]
    channels = kernel.dims[op.filter_labels.index("i")]  # of one group
    group_features = features // op.feature_groups
    window = kernel.size // features // channels
    if is_input_gradient:
        rows = result.size // (channels * op.feature_groups)
        sides = rows, channels, group_features * window
    else:
        rows = (rhs if is_filter_gradient else result).size // features
        sides = rows, group_features, channels * window
        # XLA writes some filter gradients as convolutions with a window of many pixels.
        is_filter_gradient |= window > rows // lhs.dims[op.batch_dimension]
    return MatrixShape(
        "filter gradient" if is_filter_gradient else "convolution",
        min(sides),
        is_aligned(lhs.bits // 8, (channels * op.feature_groups, features)),
        volume=len(kernel.dims) == 5,
    )


def _dot_flops(op: Instruction, lhs: Array, rhs: Array, result: Array) -> float:
    return 2.0 * result.size * math.prod(lhs.dims[axis] for axis in op.contracted)


def _conv_flops(op: Instruction, image: Array, kernel: Array, result: Array) -> float:
    """FLOPs of a convolution or of one of its gradients.

    Products with the zeros of a dilated image do not count.

    Args:
      image, kernel, result: the operands and the result of the forward convolution.
    """
    features = kernel.dims[op.filter_labels.index("o")] if op.filter_labels else 1
    dilation = math.prod(op.base_dilation)
    return 2.0 * result.size * kernel.size / features / dilation / op.batch_groups


_Rule = Callable[[Instruction, Array, Array, Array], float]
_FLOPS: dict[str, _Rule] = {
    "dot": _dot_flops,
    "__cublas$": _dot_flops,
    "convolution": _conv_flops,
    _INPUT_GRADIENT: lambda op, dy, kernel, dx: _conv_flops(op, dx, kernel, dy),
    _FILTER_GRADIENT: lambda op, x, dy, kernel: _conv_flops(op, x, kernel, dy),
    "__cudnn$conv": _conv_flops,
}


@functools.lru_cache(maxsize=256)
def _rule(name: str) -> _Rule | None:
    """The FLOPs rule of an opcode or of a library call."""
    return next((rule for prefix, rule in _FLOPS.items() if name.startswith(prefix)), None)
