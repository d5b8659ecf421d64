"""The axes of every kind of primitive: a table of rules.

A primitive without a rule has none: it is computed from whole operands. That is correct, and told. Here are the rules
of those that read the same rows of their operands as they make; `window_rules` are those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memplan.program import compat
from memplan.program.axes import Axes, Axis, Reduction, shape_of
from memplan.program.window_rules import (
    banded,
    concatenate,
    convolution,
    pad,
    reshape,
    select_and_scatter,
    slice_,
    windowed,
)

Rule = Callable[[compat.JaxprEqn], Axes | None]


def axes_of(eqn: compat.JaxprEqn) -> Axes | None:
    """The axes of an equation, by the rule of its primitive; None where nothing can be divided."""
    rule = RULES.get(eqn.primitive.name)
    return rule(eqn) if rule else None


def _parallel(eqn: compat.JaxprEqn, blocked: Sequence[int] = ()) -> Axes:
    """Results have the dimensions of the operands, scalars none. Those repeated or `blocked` cannot be divided."""
    result = shape_of(eqn.outvars[0])
    rank = len(result)
    if any(len(shape_of(atom)) not in (0, rank) for atom in eqn.invars):
        blocked = range(rank)
    names = tuple(None if dim in blocked else dim for dim in range(rank))

    def side(atom: Any) -> tuple[Axis, ...]:
        return tuple(None if size != result[dim] else names[dim] for dim, size in enumerate(shape_of(atom)))

    return Axes(tuple(map(side, eqn.invars)), tuple(names for _ in eqn.outvars))


def _along(name: str) -> Rule:
    """Parallel but for the dimension that a parameter names."""

    def rule(eqn: compat.JaxprEqn) -> Axes:
        axis = eqn.params[name]
        rank = len(shape_of(eqn.invars[0]))
        return _parallel(eqn, [axis % rank] if rank else [])

    return rule


def _cumulative(eqn: compat.JaxprEqn) -> Axes:
    """Along its own dimension row after row, from the first one on; complex numbers have no least one to begin with."""
    axis = eqn.params["axis"]
    if eqn.params["reverse"] or np.issubdtype(compat.aval_of(eqn.invars[0]).dtype, np.complexfloating):
        return _parallel(eqn, [axis])
    return replace(_parallel(eqn), carried=(axis,))


def _top_k(eqn: compat.JaxprEqn) -> Axes:
    rank = len(shape_of(eqn.invars[0]))
    return _parallel(eqn, [eqn.params.get("axis", rank - 1) % rank])


def _stack(eqn: compat.JaxprEqn) -> Axes:
    """The new dimension cannot be divided: its parts are different operands."""
    rank, axis = len(shape_of(eqn.invars[0])), eqn.params["axis"]
    names = tuple(range(rank))
    return Axes(tuple(names for _ in eqn.invars), ((*names[:axis], None, *names[axis:]),))


def _unstack(eqn: compat.JaxprEqn) -> Axes:
    rank, axis = len(shape_of(eqn.invars[0])), eqn.params["axis"]
    names = tuple(range(rank - 1))
    return Axes(((*names[:axis], None, *names[axis:]),), tuple(names for _ in eqn.outvars))


def _tile(eqn: compat.JaxprEqn) -> Axes:
    return _parallel(eqn, [dim for dim, times in enumerate(eqn.params["reps"]) if times != 1])


def _same_size(eqn: compat.JaxprEqn) -> Axes:
    """Dimensions may be divided in which first operand, result and further arrays have the same size."""
    rank = len(shape_of(eqn.outvars[0]))
    alike = [shape for shape in map(shape_of, (*eqn.invars, *eqn.outvars)) if len(shape) == rank]
    blocked = [dim for dim in range(rank) if len({shape[dim] for shape in alike}) > 1]
    return _parallel(eqn, blocked)


def _reduce(how: Reduction) -> Rule:
    def rule(eqn: compat.JaxprEqn) -> Axes:
        axes = eqn.params["axes"]
        rank = len(shape_of(eqn.invars[0]))
        if eqn.primitive.name in _BITWISE and compat.aval_of(eqn.invars[0]).dtype != bool:
            return _arg_reduce(eqn)
        kept = tuple(dim for dim in range(rank) if dim not in axes)
        return Axes((tuple(range(rank)),), (kept,), dict.fromkeys(axes, how))

    return rule


def _moments(eqn: compat.JaxprEqn) -> Axes:
    """Reduced as a sum is, but parts are put together with their counts and means; the counts go along.

    Where they do not, nobody could say which rows of a part count.
    """
    axes = eqn.params["axes"]
    shape, counts = map(shape_of, eqn.invars)
    kept = tuple(dim for dim in range(len(shape)) if dim not in axes)
    counted = tuple(dim if counts[dim] == shape[dim] and dim in axes else None for dim in range(len(shape)))
    operand = tuple(counted[dim] if dim in axes else dim for dim in range(len(shape)))
    reduced: dict[int, Reduction] = {dim: "moments" for dim in counted if dim is not None}
    return Axes((operand, counted), (kept,), reduced)


_BITWISE = ("reduce_or", "reduce_and")  # of truth values they are a maximum and a minimum


def _arg_reduce(eqn: compat.JaxprEqn) -> Axes:
    axes = eqn.params["axes"]
    rank = len(shape_of(eqn.invars[0]))
    operand = tuple(None if dim in axes else dim for dim in range(rank))
    return Axes((operand,), (tuple(dim for dim in operand if dim is not None),))


def _transpose(eqn: compat.JaxprEqn) -> Axes:
    order = eqn.params["permutation"]
    return Axes((tuple(range(len(order))),), (tuple(order),))


def _broadcast_in_dim(eqn: compat.JaxprEqn) -> Axes:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    given = shape_of(eqn.invars[0])
    operand = tuple(dim if size == shape[dim] else None for dim, size in zip(dims, given, strict=True))
    rest = tuple(() for _ in eqn.invars[1:])
    return Axes((operand, *rest), (tuple(range(len(shape))),))


def _squeeze(eqn: compat.JaxprEqn) -> Axes:
    gone, rank = eqn.params["dimensions"], len(shape_of(eqn.invars[0]))
    gone = [dim % rank for dim in gone]
    operand = tuple(None if dim in gone else dim for dim in range(rank))
    return Axes((operand,), (tuple(dim for dim in operand if dim is not None),))


def _dot_general(eqn: compat.JaxprEqn) -> Axes:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    names_l: dict[int, int] = {}
    names_r: dict[int, int] = {}
    pairs = zip((*batch_l, *contract_l), (*batch_r, *contract_r), strict=True)
    for number, (of_left, of_right) in enumerate(pairs):
        names_l[of_left] = names_r[of_right] = number
    shared = len(names_l)
    free_l = [dim for dim in range(len(left)) if dim not in names_l]
    free_r = [dim for dim in range(len(right)) if dim not in names_r]
    names_l |= {dim: shared + number for number, dim in enumerate(free_l)}
    names_r |= {dim: shared + len(free_l) + number for number, dim in enumerate(free_r)}
    result = (*(names_l[d] for d in batch_l), *(names_l[d] for d in free_l), *(names_r[d] for d in free_r))
    operands = (tuple(names_l[d] for d in range(len(left))), tuple(names_r[d] for d in range(len(right))))
    return Axes(operands, (result,), {names_l[d]: "sum" for d in contract_l})


def _gather(eqn: compat.JaxprEqn) -> Axes:
    """Along the indices, dimensions of the operand that are batched with them, and those that every slice has whole."""
    numbers = eqn.params["dimension_numbers"]
    shape, rank, indices = shape_of(eqn.invars[0]), len(shape_of(eqn.outvars[0])), len(shape_of(eqn.invars[1])) - 1
    batch = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    result: list[Axis] = [None] * rank
    for axis, dim in enumerate(batch):
        result[dim] = axis
    operand: list[Axis] = [None] * len(shape)
    for of_operand, of_indices in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[of_operand] = of_indices
    window = _window(len(shape), numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    for of_operand, dim in zip(window, numbers.offset_dims, strict=True):
        if eqn.params["slice_sizes"][of_operand] == shape[of_operand] and of_operand not in numbers.start_index_map:
            operand[of_operand] = result[dim] = indices + of_operand
    return Axes((tuple(operand), (*range(indices), None)), (tuple(result),))


def _window(rank: int, gone: Sequence[int], batched: Sequence[int]) -> list[int]:
    """Dimensions of an operand that its slices have."""
    return [dim for dim in range(rank) if dim not in gone and dim not in batched]


def _scatter(eqn: compat.JaxprEqn) -> Axes:
    """Along dimensions that are batched with the indices, and those that every update has whole."""
    numbers = eqn.params["dimension_numbers"]
    shape, given = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    indices = len(shape_of(eqn.invars[1])) - 1
    batch = [dim for dim in range(len(given)) if dim not in numbers.update_window_dims]
    operand: list[Axis] = [None] * len(shape)
    updates: list[Axis] = [None] * len(given)
    rows: list[Axis] = [None] * indices
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for of_operand, of_indices in pairs:
        operand[of_operand] = rows[of_indices] = updates[batch[of_indices]] = of_indices
    window = _window(len(shape), numbers.inserted_window_dims, numbers.operand_batching_dims)
    for of_operand, dim in zip(window, numbers.update_window_dims, strict=True):
        if given[dim] == shape[of_operand] and of_operand not in numbers.scatter_dims_to_operand_dims:
            operand[of_operand] = updates[dim] = indices + of_operand
    return Axes((tuple(operand), (*rows, None), tuple(updates)), (tuple(operand),))


def _scatter_add(eqn: compat.JaxprEqn) -> Axes:
    """Along the indices too: the updates of all parts are summed, what they are added to counts once."""
    numbers = eqn.params["dimension_numbers"]
    found = _scatter(eqn)
    updates, rows = list(found.operands[2]), list(found.operands[1])
    batch = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    summed = [axis for axis, known in enumerate(rows[:-1]) if known is None]
    for axis in summed:
        rows[axis] = updates[batch[axis]] = axis
    operands = (found.operands[0], tuple(rows), tuple(updates))
    return Axes(operands, found.results, dict.fromkeys(summed, "sum"), masked=(0,))


def _iota(eqn: compat.JaxprEqn) -> Axes:
    return Axes(tuple(() for _ in eqn.invars), (tuple(range(len(eqn.params["shape"]))),))


def _random_bits(eqn: compat.JaxprEqn) -> Axes | None:
    """One key for each part, or the bits of one key, which `lower` counts from where the part begins."""
    keys, rank = len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))
    if keys:
        return _keywise(eqn)
    bits: tuple[Axis, ...] = (0, *(None,) * (rank - 1)) if rank else ()
    return Axes(((),), (bits,))


def _keywise(eqn: compat.JaxprEqn) -> Axes | None:
    """Of arrays of keys, along the dimensions that all have: with threefry each draws by itself, whatever the others.

    Other generators do not promise that: one key of a batch draws for all.
    """
    if not all(map(compat.draws_by_itself, (*eqn.invars, *eqn.outvars))):
        return None
    rank = min(len(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars))
    names = tuple(range(rank))

    def side(atom: Any) -> tuple[Axis, ...]:
        return (*names, *(None,) * (len(shape_of(atom)) - rank))

    return Axes(tuple(map(side, eqn.invars)), tuple(map(side, eqn.outvars)))


_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz complex conj "
    "convert_element_type copy cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg nextafter not "
    "one_minus_square or polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _parallel),
    "reduce_sum": _reduce("sum"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_or": _reduce("max"),
    "reduce_and": _reduce("min"),
    "squares_about_mean": _moments,
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": _squeeze,
    "reshape": reshape,
    "dot_general": _dot_general,
    "banded": banded,
    "conv_general_dilated": convolution,
    "concatenate": concatenate,
    "split": _along("axis"),
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumlogsumexp": _cumulative,
    "sort": _along("dimension"),
    "rev": lambda eqn: _parallel(eqn, eqn.params["dimensions"]),
    "top_k": _top_k,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": pad,
    "slice": slice_,
    "dynamic_slice": _same_size,
    "dynamic_update_slice": _same_size,
    "reduce_window_max": windowed,
    "reduce_window_min": windowed,
    "reduce_window_sum": windowed,
    "reduce_window": windowed,
    "select_and_scatter_add": select_and_scatter,
    "select_and_gather_add": windowed,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "scatter-sub": _scatter,
    "iota": _iota,
    "empty": _iota,
    "random_bits": _random_bits,
    "random_wrap": _keywise,
    "random_unwrap": _keywise,
    "random_fold_in": _keywise,
    "random_split": _keywise,
    "random_seed": _keywise,
    "random_clone": _keywise,
}
