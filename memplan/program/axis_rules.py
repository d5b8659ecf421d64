"""The axes of every kind of primitive: a table of rules.

A primitive without a rule has none: it is computed from whole operands. That is correct, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from memplan.planning.rows import Rows
from memplan.program import compat
from memplan.program.axes import Axes, Axis, Reduction, shape_of

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
    """Reduced as a sum is, but parts are put together with their counts and means; the counts go along."""
    axes = eqn.params["axes"]
    shape, counts = map(shape_of, eqn.invars)
    kept = tuple(dim for dim in range(len(shape)) if dim not in axes)
    counted = tuple(dim if counts[dim] > 1 and dim in axes else None for dim in range(len(shape)))
    reduced: dict[int, Reduction] = dict.fromkeys(axes, "moments")
    return Axes((tuple(range(len(shape))), counted), (kept,), reduced)


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


def _reshape(eqn: compat.JaxprEqn) -> Axes | None:
    """In every group of dimensions that become one another, the outermost can be divided: its blocks stay together."""
    if eqn.params.get("dimensions") is not None:
        return None
    before, after = shape_of(eqn.invars[0]), tuple(eqn.params["new_sizes"])
    operand: list[Axis] = [None] * len(before)
    result: list[Axis] = [None] * len(after)
    rows: dict[tuple[int, int], Rows] = {}
    for number, (left, right) in enumerate(_groups(before, after)):
        heads = next((d for d in left if before[d] > 1), None), next((d for d in right if after[d] > 1), None)
        if heads[0] is not None and heads[1] is not None:
            operand[heads[0]] = result[heads[1]] = number
            rows[0, number] = _blocks(before[heads[0]], after[heads[1]])
    return Axes((tuple(operand),), (tuple(result),), rows=rows)


def _blocks(before: int, after: int) -> Rows:
    """Rows that become several each, or of which several become one; else all, as of a window over everything."""
    if after % before == 0:
        times = after // before
        return Rows(dilation=times, before=times - 1, reach=times)
    if before % after == 0:
        return Rows(stride=before // after, reach=before // after)
    return Rows(stride=0, reach=before)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions with the same number of elements, in order."""
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(before):
                a, left, i = a * before[i], [*left, i], i + 1
            elif j < len(after):
                b, right, j = b * after[j], [*right, j], j + 1
            else:
                return
        yield left, right


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


_BATCH, _FEATURES_IN, _FEATURES_OUT, _SPACE = 0, 1, 2, 3


def _convolution(eqn: compat.JaxprEqn) -> Axes:
    """Batch, input features (summed over), output features, and space; of a grouped one the groups stay together.

    In space the image goes with the result, or, where the filter is the larger, with the filter and is summed over: so
    is the gradient of a filter written.
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
    made, filters = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    space = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for number, (of_left, of_right, of_out) in enumerate(space):
        axis = left[of_left] = _SPACE + number
        stride, apart = eqn.params["window_strides"][number], eqn.params["rhs_dilation"][number]
        before, dilation = eqn.params["padding"][number][0], eqn.params["lhs_dilation"][number]
        if filters[of_right] > made[of_out]:
            right[of_right], reduced[axis] = axis, "sum"
            rows[0, axis] = Rows(apart, dilation, before, (made[of_out] - 1) * stride + 1)
        else:
            out[of_out] = axis
            rows[0, axis] = Rows(stride, dilation, before, (filters[of_right] - 1) * apart + 1)
    return Axes((tuple(left), tuple(right)), (tuple(out),), reduced, rows=rows)


def _windowed(eqn: compat.JaxprEqn, of_operands: Sequence[int] = (0,)) -> Axes:
    """Every dimension; over those where the window reaches, rows read their neighbours."""
    return _with_rows(eqn, [window.rows for window in windows_of(eqn)], of_operands)


class Window(NamedTuple):
    """How a reduction over windows goes along one dimension."""

    size: int
    stride: int
    padding: tuple[int, int]
    dilation: int
    apart: int

    @property
    def reach(self) -> int:
        return (self.size - 1) * self.apart + 1

    @property
    def rows(self) -> Rows:
        return Rows(self.stride, self.dilation, self.padding[0], self.reach)


def windows_of(eqn: compat.JaxprEqn) -> list[Window]:
    """By dimension, of an equation that reduces over windows."""
    sizes = eqn.params["window_dimensions"]
    ones = (1,) * len(sizes)
    params = ("window_strides", ones), ("padding", ((0, 0),) * len(sizes)), ("base_dilation", ones), (
        "window_dilation", ones)  # fmt: skip
    rest = (eqn.params.get(name) or default for name, default in params)
    return [Window(*of_dim) for of_dim in zip(sizes, *rest, strict=True)]


def _selected(eqn: compat.JaxprEqn) -> Axes:
    """The gradient of a maximum: a row reads the windows that it is in (their source), and all rows that they reach."""
    rows: dict[tuple[int, int], Rows] = {}
    for dim, window in enumerate(windows_of(eqn)):
        rows[0, dim] = Rows(1, window.stride, window.reach - 1 - window.padding[0], window.reach)
        rows[1, dim] = Rows(window.stride, 1, window.padding[0], window.reach, via=rows[0, dim])
    return _sides(eqn, rows)


def _with_rows(eqn: compat.JaxprEqn, rows: Sequence[Rows], of_operands: Sequence[int] = (0,)) -> Axes:
    """One axis per dimension, with the rows of some operands."""
    return _sides(eqn, {(n, dim): one for dim, one in enumerate(rows) for n in of_operands})


def _sides(eqn: compat.JaxprEqn, rows: Mapping[tuple[int, int], Rows]) -> Axes:
    rank = len(shape_of(eqn.outvars[0]))
    names = tuple(range(rank))
    operands = tuple(names if len(shape_of(atom)) == rank else () for atom in eqn.invars)
    return Axes(operands, tuple(names for _ in eqn.outvars), rows=rows)


def _pad(eqn: compat.JaxprEqn) -> Axes:
    return _with_rows(eqn, [Rows(1, within + 1, low, 1) for low, _, within in eqn.params["padding_config"]])


def _slice(eqn: compat.JaxprEqn) -> Axes:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return _with_rows(eqn, [Rows(stride, 1, -start, 1) for start, stride in zip(starts, strides, strict=True)])


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
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "cumsum": _along("axis"),
    "cumprod": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumlogsumexp": _along("axis"),
    "sort": _along("dimension"),
    "rev": lambda eqn: _parallel(eqn, eqn.params["dimensions"]),
    "top_k": _top_k,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _same_size,
    "dynamic_update_slice": _same_size,
    "reduce_window_max": _windowed,
    "reduce_window_min": _windowed,
    "reduce_window_sum": _windowed,
    "reduce_window": _windowed,
    "select_and_scatter_add": _selected,
    "select_and_gather_add": lambda eqn: _windowed(eqn, of_operands=(0, 1)),
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
