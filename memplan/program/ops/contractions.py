"""Matrix products and convolutions."""

import math
from typing import Any

from jax import lax

from memplan.hardware.efficiency import PRODUCT, MatrixShape, is_aligned
from memplan.planning.graph import Rows
from memplan.program import compat
from memplan.program.ops.axes import Axes, Axis, Reduction, shape_of
from memplan.program.ops.record import Eqn, Part, Primitive, register
from memplan.program.ops.windows import Window


def _dot_general(eqn: Eqn) -> Axes:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    lhs_dims, rhs_dims = (range(len(shape_of(atom))) for atom in eqn.invars)
    paired_l = (*batch_l, *contract_l)
    paired_r = (*batch_r, *contract_r)
    free_l = [dim for dim in lhs_dims if dim not in paired_l]
    free_r = [dim for dim in rhs_dims if dim not in paired_r]
    axis_l = {dim: axis for axis, dim in enumerate((*paired_l, *free_l))}
    axis_r = {dim: axis for axis, dim in enumerate(paired_r)}
    axis_r.update((dim, axis) for axis, dim in enumerate(free_r, start=len(lhs_dims)))
    result = (*(axis_l[dim] for dim in (*batch_l, *free_l)), *(axis_r[dim] for dim in free_r))
    operands = tuple(axis_l[dim] for dim in lhs_dims), tuple(axis_r[dim] for dim in rhs_dims)
    return Axes(operands, (result,), {axis_l[dim]: "sum" for dim in contract_l})


def _dot_flops(eqn: Eqn) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = shape_of(eqn.invars[0])
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * math.prod(lhs[axis] for axis in contracting)


register(
    "dot_general",
    Primitive(flops=_dot_flops, matrix_shape=lambda eqn: PRODUCT, axes=_dot_general),
)

_BATCH, _FEATURES_IN, _FEATURES_OUT, _SPACE = 0, 1, 2, 3


def _convolution(eqn: Eqn) -> Axes:
    """Batch, input features (reduced), output features, and space; feature groups are not divided.

    A spatial axis has the image and the result. If the kernel is larger than the result, as in
    gradients of kernels, it has the image and the kernel, and is reduced.
    """
    numbers = eqn.params["dimension_numbers"]
    ungrouped = eqn.params["feature_group_count"] == 1
    one_batch = eqn.params["batch_group_count"] == 1
    rank = len(numbers.lhs_spec)
    sides: tuple[list[Axis], ...] = tuple([None] * rank for _ in range(3))
    lhs, rhs, out = sides
    if one_batch:
        lhs[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = _BATCH
    if ungrouped:
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = _FEATURES_IN
    if ungrouped and one_batch:
        rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = _FEATURES_OUT
    reduced: dict[int, Reduction] = {_FEATURES_IN: "sum"} if ungrouped else {}
    rows: dict[tuple[int, int], Rows] = {}
    kernel_shape = shape_of(eqn.invars[1])
    result_shape = shape_of(eqn.outvars[0])
    specs = (spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    params = (eqn.params[name] for name in names)
    dims = zip(*specs, *params, strict=True)
    for axis, (lhs_dim, rhs_dim, out_dim, *window_params) in enumerate(dims, start=_SPACE):
        window = Window(kernel_shape[rhs_dim], *window_params)
        size = result_shape[out_dim]
        lhs[lhs_dim] = axis
        if window.size > size:
            rhs[rhs_dim] = axis
            reduced[axis] = "sum"
            swapped = window._replace(size=size, stride=window.apart, apart=window.stride)
            rows[0, axis] = swapped.rows
        else:
            out[out_dim] = axis
            rows[0, axis] = window.rows
    return Axes((tuple(lhs), tuple(rhs)), (tuple(out),), reduced, rows=rows)


def _convolution_rows(part: Part, operands: list[Any]) -> list[Any]:
    """The convolution of a window of rows.

    XLA aborts the process for dimensions of a certain form. Along these, the convolution computes
    an extra row, which is cut off.

    XLA's operand swap mistakes a dimension for one of groups if it has no padding and `lhs_dilation
    == size == stride + 1`. XLA does not check that the image has `size` rows, as groups have
    (`is_group_dim` in algebraic_simplifier.cc of jaxlib 0.11 and 0.12, then
    conv_operand_swapper.cc). It swaps if the kernel has more rows than the image along the other
    dimensions, as in slabs of few rows and in gradients of kernels.
    """
    image, kernel = operands
    params = part.eqn.params
    numbers = params["dimension_numbers"]
    padding = list(params["padding"])
    dim = part.axes.dim_of(part.axes.operands[0], part.axis)
    if dim in numbers.lhs_spec[2:]:
        padding[numbers.lhs_spec[2:].index(dim)] = part.padding()
    padded = list[int]()
    for number, stride in enumerate(params["window_strides"]):
        rows = image.shape[numbers.lhs_spec[2 + number]]
        size = kernel.shape[numbers.rhs_spec[2 + number]]
        is_plain = tuple(padding[number]) == (0, 0) and params["rhs_dilation"][number] == 1
        if is_plain and params["lhs_dilation"][number] == size == stride + 1 != rows:
            padded.append(number)
            padding[number] = (0, stride)
    (result,) = part.bind(operands, padding=tuple(padding))
    limits = list(result.shape)
    for number in padded:
        limits[numbers.out_spec[2 + number]] -= 1
    return [lax.slice(result, [0] * result.ndim, limits) if padded else result]


def _convolution_flops(eqn: Eqn) -> float:
    """FLOPs, without products with the zeros of a dilated input, which cuDNN skips."""
    kernel = shape_of(eqn.invars[1])
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    dilation = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * math.prod(kernel) / features / dilation


def _convolution_shape(eqn: Eqn) -> MatrixShape:
    """The shape of the implicit product.

    A filter gradient is written as a convolution whose window has more pixels than its result: its
    window is the gradient of the result, and its image has channels as batch.
    """
    numbers = eqn.params["dimension_numbers"]
    image = shape_of(eqn.invars[0])
    kernel = shape_of(eqn.invars[1])
    result = shape_of(eqn.outvars[0])
    features = kernel[numbers.rhs_spec[0]]
    window = math.prod(kernel[dim] for dim in numbers.rhs_spec[2:])
    pixels = math.prod(result[dim] for dim in numbers.out_spec[2:])
    is_gradient = window > pixels
    channels = image[numbers.lhs_spec[0 if is_gradient else 1]], features
    return MatrixShape(
        kind="filter gradient" if is_gradient else "convolution",
        narrowest=min(
            math.prod(result) // features,
            features // (eqn.params["feature_group_count"] * eqn.params["batch_group_count"]),
            math.prod(kernel) // features,
        ),
        aligned=is_aligned(compat.aval_of(eqn.invars[0]).dtype.itemsize, channels),
        volume=len(numbers.lhs_spec) == 5,
    )


def _reversed_filter_dims(eqn: Eqn, position: int) -> tuple[int, ...]:
    """The filter's spatial dimensions, if the convolution is transposed.

    By the reversal next to it, XLA recognizes a transposed convolution, which also is the gradient
    of a strided one. Otherwise cuDNN multiplies the zeros between the image's rows, too: 293
    instead of 49 ms for a gradient in a residual U-Net of 384^3 on a V100.
    """
    is_transposed = max(eqn.params["lhs_dilation"]) > 1
    return eqn.params["dimension_numbers"].rhs_spec[2:] if position == 1 and is_transposed else ()


register(
    "conv_general_dilated",
    Primitive(
        flops=_convolution_flops,
        matrix_shape=_convolution_shape,
        axes=_convolution,
        run_rows=_convolution_rows,
        reversed_dims=_reversed_filter_dims,
    ),
)
