"""Matrix products and convolutions."""

import math
from typing import Any

from jax import lax

from memplan.planning.graph import Rows
from memplan.program.ops.axes import Axes, Axis, Reduction, shape_of
from memplan.program.ops.record import Eqn, Part, Primitive, register
from memplan.program.ops.windows import Window


def _dot_general(eqn: Eqn) -> Axes:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = (range(len(shape_of(atom))) for atom in eqn.invars)
    paired_l, paired_r = (*batch_l, *contract_l), (*batch_r, *contract_r)
    free_l, free_r = ([dim for dim in left if dim not in paired_l], [dim for dim in right if dim not in paired_r])
    axis_l = {dim: axis for axis, dim in enumerate((*paired_l, *free_l))}
    axis_r = {dim: axis for axis, dim in (*enumerate(paired_r), *enumerate(free_r, start=len(left)))}
    result = (*(axis_l[dim] for dim in (*batch_l, *free_l)), *(axis_r[dim] for dim in free_r))
    operands = tuple(axis_l[dim] for dim in left), tuple(axis_r[dim] for dim in right)
    return Axes(operands, (result,), {axis_l[dim]: "sum" for dim in contract_l})


def _dot_flops(eqn: Eqn) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = shape_of(eqn.invars[0])
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * math.prod(lhs[axis] for axis in contracting)


register("dot_general", Primitive(flops=_dot_flops, is_matrix_product=True, axes=_dot_general))

_BATCH, _FEATURES_IN, _FEATURES_OUT, _SPACE = 0, 1, 2, 3


def _convolution(eqn: Eqn) -> Axes:
    """Batch, input features (reduced), output features, and space; in a grouped convolution, groups stay together.

    In space the image goes with the result or, if the filter is the larger one, with the filter, and is reduced:
    gradients of filters have this form.
    """
    numbers = eqn.params["dimension_numbers"]
    ungrouped = eqn.params["feature_group_count"] == 1
    one_batch = eqn.params["batch_group_count"] == 1
    rank = len(numbers.lhs_spec)
    sides: tuple[list[Axis], ...] = tuple([None] * rank for _ in range(3))
    left, right, out = sides
    if one_batch:
        left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = _BATCH
    if ungrouped:
        left[numbers.lhs_spec[1]] = right[numbers.rhs_spec[1]] = _FEATURES_IN
    if ungrouped and one_batch:
        right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = _FEATURES_OUT
    reduced: dict[int, Reduction] = {_FEATURES_IN: "sum"} if ungrouped else {}
    rows: dict[tuple[int, int], Rows] = {}
    filters, made = shape_of(eqn.invars[1]), shape_of(eqn.outvars[0])
    specs = (spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    params = (eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    for axis, (of_left, of_right, of_out, *given) in enumerate(zip(*specs, *params, strict=True), start=_SPACE):
        window, left[of_left] = Window(filters[of_right], *given), axis
        if window.size > made[of_out]:
            right[of_right], reduced[axis] = axis, "sum"
            rows[0, axis] = window._replace(size=made[of_out], stride=window.apart, apart=window.stride).rows
        else:
            out[of_out] = axis
            rows[0, axis] = window.rows
    return Axes((tuple(left), tuple(right)), (tuple(out),), reduced, rows=rows)


def _convolution_rows(part: Part, operands: list[Any]) -> list[Any]:
    """The convolution, with an extra row that is cut off, along dimensions of a form on which XLA aborts the process.

    XLA's operand swap takes a dimension without padding, with `lhs_dilation == size == stride + 1`, for a dimension of
    groups, and does not check that the image has `size` rows too, as groups have (`is_group_dim` in
    algebraic_simplifier.cc of jaxlib 0.11 and 0.12, then conv_operand_swapper.cc). It swaps if the kernel has more rows
    than the image along the other dimensions, as in slabs of few rows and in gradients of kernels.
    """
    image, kernel = operands
    params, numbers = part.eqn.params, part.eqn.params["dimension_numbers"]
    padding, dim = list(params["padding"]), part.axes.dim_of(part.axes.operands[0], part.axis)
    if dim in numbers.lhs_spec[2:]:
        padding[numbers.lhs_spec[2:].index(dim)] = part.padding()
    more = list[int]()
    for number, stride in enumerate(params["window_strides"]):
        rows, size = image.shape[numbers.lhs_spec[2 + number]], kernel.shape[numbers.rhs_spec[2 + number]]
        free = tuple(padding[number]) == (0, 0) and params["rhs_dilation"][number] == 1
        if free and params["lhs_dilation"][number] == size == stride + 1 != rows:
            more.append(number)
            padding[number] = (0, stride)
    (made,) = part.bind(operands, padding=tuple(padding))
    limits = list(made.shape)
    for number in more:
        limits[numbers.out_spec[2 + number]] -= 1
    return [lax.slice(made, [0] * made.ndim, limits) if more else made]


def _convolution_flops(eqn: Eqn) -> float:
    """FLOPs, without products with the zeros of a dilated input, which cuDNN skips."""
    kernel = shape_of(eqn.invars[1])
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    dilation = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * math.prod(kernel) / features / dilation


register(
    "conv_general_dilated",
    Primitive(flops=_convolution_flops, is_matrix_product=True, axes=_convolution, run_rows=_convolution_rows),
)
