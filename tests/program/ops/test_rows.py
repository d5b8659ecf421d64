"""Every equation on windows of its rows, also of rows that do not exist, against the equation on all of them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from experiments.bench.second_order import drawn_step
from memplan.planning.graph import Span
from memplan.program import compat, ops
from memplan.program.flat import flatten
from memplan.program.ops import (
    Axes,
    Band,
    Moments,
    axes_of,
    banded,
    extreme,
    needed,
    padding_value,
    row_before,
    run_cumulative,
    run_rows,
    squares_about_mean,
)
from memplan.program.ops.record import Primitive
from tests.program.ops import operations
from tests.program.ops.equations import Equation, equations_with_axes
from tests.program.ops.windows import (
    SEEDS,
    Convolution,
    Dim,
    Windows,
    convolutions,
    floats,
    windows,
)
from tests.program.scans import QUICK

BEYOND = 3  # rows that a window may reach beyond an array
COUNTED = ("iota",)  # where a window begins says what is in it: whoever runs it knows
few = settings(max_examples=3)  # each compiles tens of operations


def window_of(array: Any, dim: int, span: Span) -> np.ndarray:
    """Rows of an array; garbage where it has none."""
    if compat.is_key(array):
        return jax.random.wrap_key_data(window_of(jax.random.key_data(array), dim, span))
    array = np.asarray(array)
    rows = np.arange(*span)
    rows_or_edge = np.take(array, rows.clip(0, array.shape[dim] - 1), dim)
    shape = [-1 if d == dim else 1 for d in range(array.ndim)]
    is_valid = ((rows >= 0) & (rows < array.shape[dim])).reshape(shape)
    garbage = np.nan if array.dtype.kind == "f" else 113
    return np.where(is_valid, rows_or_edge, np.array(garbage, array.dtype))


def masked(window: np.ndarray, dim: int, span: Span, size: int, fill: Any) -> np.ndarray:
    rows = np.arange(*span)
    shape = [-1 if d == dim else 1 for d in range(window.ndim)]
    is_valid = ((rows >= 0) & (rows < size)).reshape(shape)
    return np.where(is_valid, window, np.asarray(fill, window.dtype))


def on_rows(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, operands: Sequence[Any]
) -> list[Any]:
    own = windows_of(eqn, axes, axis, span, operands)
    if axis in axes.reduced:
        for position in axes.masked:
            own[position] = np.zeros_like(own[position])
    # compiled once, run once; without jit each of its operations would be compiled by itself
    run = functools.partial(run_rows, eqn, axes, axis, span, needed(axes, axis, span))
    return jax.jit(run, compiler_options=QUICK)([*map(jnp.asarray, own)])


def windows_of(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, operands: Sequence[Any]
) -> list[Any]:
    """What rows of the results read of the operands, filled where those have none."""
    spans, own = needed(axes, axis, span), list(operands)
    for position, rows in spans.items():
        assert rows[0] < rows[1]
        own[position] = window_of(operands[position], axes.operands[position].index(axis), rows)
    for position, rows in spans.items():
        fill = padding_value(eqn, axes, axis, position, own)
        if fill is not None:
            dim = axes.operands[position].index(axis)
            own[position] = masked(
                own[position], dim, rows, np.shape(operands[position])[dim], fill
            )
    return own


def check_windows(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    operands: Sequence[Any],
    whole: Sequence[Any],
    rng: Any,
) -> None:
    count = axes.counted(axis, eqn)
    low = int(rng.integers(-BEYOND, count + BEYOND))
    high = int(rng.integers(low + 1, count + BEYOND + 2))
    compare(eqn, axes, axis, (low, high), on_rows(eqn, axes, axis, (low, high), operands), whole)


def compare(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    span: Span,
    results: Sequence[Any],
    whole: Sequence[Any],
) -> None:
    """Compare the rows that the whole result has."""
    (low, high), count = span, axes.counted(axis, eqn)
    results = [jax.random.key_data(x) if compat.is_key(x) else x for x in results]
    whole = [jax.random.key_data(x) if compat.is_key(x) else x for x in whole]
    arrays = map(np.asarray, results), map(np.asarray, whole)
    for result, wanted, side in zip(*arrays, axes.results, strict=True):
        dim = side.index(axis)
        assert result.shape == (*wanted.shape[:dim], high - low, *wanted.shape[dim + 1 :]), eqn
        assert result.dtype == wanted.dtype
        first, last = max(low, 0), max(min(high, count), 0)
        if first < last:
            window = np.take(result, np.arange(first - low, last - low), dim)
            rows = np.take(wanted, np.arange(first, last), dim)
            close(window, rows, f"{eqn} rows {low} to {high}")


def check_sum(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    operands: Sequence[Any],
    whole: Sequence[Any],
    rng: Any,
) -> None:
    """Slab by slab, with one slab beyond the last row."""
    count, reduction = axes.counted(axis, eqn), axes.reduced[axis]
    rows = int(rng.integers(1, count + 2))
    if reduction == "moments":
        each = (
            on_rows(eqn, axes, axis, (low, low + rows), operands)[0]
            for low in range(0, count + rows, rows)
        )
        return close(
            functools.reduce(Moments.accumulate, each).squares,
            whole[0],
            f"{eqn} in slabs of {rows}",
        )
    combine, start = {
        "sum": (np.add, 0),
        "max": (np.maximum, extreme(whole[0].dtype, "min")),
        "min": (np.minimum, extreme(whole[0].dtype, "max")),
    }[reduction]
    total = np.full(whole[0].shape, start, whole[0].dtype)
    for low in range(0, count + rows, rows):
        (part,) = on_rows(eqn, axes, axis, (low, low + rows), operands)
        total = combine(total, part)
    for position in axes.masked:
        total = total + operands[position]
    close(total, whole[0], f"{eqn} in slabs of {rows}")


def check_carried(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    operands: Sequence[Any],
    whole: Sequence[Any],
    rng: Any,
) -> None:
    """Slab by slab, with rows around each, and with one slab beyond the last row."""
    count = axes.counted(axis, eqn)
    rows = int(rng.integers(1, count + 2))
    before = int(rng.integers(0, BEYOND))
    behind = int(rng.integers(0, BEYOND))
    carry = row_before(eqn, axes, axis)
    for first in range(0, count + rows, rows):
        span = first - before, first + rows + behind
        (window,) = windows_of(eqn, axes, axis, span, operands)
        result, carry = run_cumulative(eqn, jnp.asarray(window), carry, rows)
        compare(eqn, axes, axis, span, [result], whole)


def close(array: Any, wanted: Any, message: str) -> None:
    if np.asarray(wanted).dtype.kind == "f":
        np.testing.assert_allclose(array, np.asarray(wanted), rtol=3e-5, atol=3e-5, err_msg=message)
    else:
        np.testing.assert_array_equal(array, np.asarray(wanted), err_msg=message)


def known_axes(eqn: compat.JaxprEqn, axes: Axes) -> list[int]:
    """The axes along which an equation is computed by rows."""
    if eqn.primitive.name in COUNTED or not ops.of(eqn).can_run_rows(eqn):
        return []
    sides = (*axes.operands, *axes.results)
    names = {name for side in sides for name in side if name is not None}
    return [axis for axis in sorted(names) if axes.counted(axis, eqn)]


def check_axis(eqn: compat.JaxprEqn, axes: Axes, axis: int, *drawn: Any) -> None:
    if axis in axes.reduced:
        check_sum(eqn, axes, axis, *drawn)
    elif axis in axes.carried:
        check_carried(eqn, axes, axis, *drawn)
    else:
        check_windows(eqn, axes, axis, *drawn)


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    seed: int = 0,
    windows: int = 1,
    every: bool = False,
    only: str | None = None,
) -> set[str]:
    """Windows along an axis of every equation of a function, or along every axis; the primitives that have one.

    Args:
      only: the primitive whose equations are tried.
    """
    rng, tried = np.random.default_rng(seed), set[str]()
    for eqn, axes, operands, whole in equations_by_rows(function, args, only):
        axes_of_eqn = known_axes(eqn, axes)
        if not every:
            axes_of_eqn = rng.choice(axes_of_eqn, 1).tolist()
        for axis in axes_of_eqn:
            for _ in range(windows):
                check_axis(eqn, axes, axis, operands, whole, rng)
        tried.add(eqn.primitive.name)
    return tried


def equations_by_rows(
    function: Callable[..., Any], args: Sequence[Any], only: str | None
) -> list[Equation]:
    """Those of a primitive, or all, that are computed by rows."""

    def is_wanted(eqn: compat.JaxprEqn, axes: Axes) -> bool:
        return only in (None, eqn.primitive.name) and bool(known_axes(eqn, axes))

    return equations_with_axes(function, args, is_wanted)


def a_product(dice: operations.Dice, x: Any) -> Any:
    """With a banded matrix."""
    matrix = np.tri(7, x.shape[0], dice.below(3)) - np.tri(7, x.shape[0], -1)
    band = Band.of(matrix.shape, *np.nonzero(matrix), matrix[np.nonzero(matrix)].astype(np.float32))
    return banded(x, band.weights, 0, band.rows, 7, x.dtype)


def squares(dice: operations.Dice, x: Any) -> Any:
    return squares_about_mean(x, jnp.ones((x.shape[0], 1, 1)), dice.of(((0,), (0, 1), (0, 2))))


DRAWS: dict[str, operations.Op] = {
    **operations.ELEMENTWISE, **operations.ELEMENTWISE_EXACT, **operations.ELEMENTWISE_SMOOTH, **operations.SHAPED,
    **operations.SHAPED_EXACT, **operations.SHAPED_SMOOTH, "banded": a_product, "squares_about_mean": squares,
}  # fmt: skip


def has_rows(record: Primitive) -> bool:
    has_axes = record.axes is not Primitive.axes
    return bool(has_axes or record.run_rows or record.padding_value or record.accumulate)


RULED = sorted(name for name, record in ops.RECORDS.items() if has_rows(record))


@pytest.mark.parametrize(
    "name",
    [
        # compiles for long, as `igamma` does, and has the same rule
        pytest.param(name, marks=[pytest.mark.slow] * (name == "igammac"))
        for name in RULED
        # `tests.program.slabs.test_shard_maps` draws `pvary`, which occurs in them alone
        if name not in COUNTED and name != "pvary"
    ],
)
def test_every_record_that_says_something_of_rows_is_right_on_windows(name: str) -> None:
    """A function here or in `tests.program.ops.operations` must draw every primitive with rows."""
    if name == "scatter-sub" and not hasattr(lax, "scatter_sub"):
        pytest.skip("this jax has none")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = np.clip(np.round(rng.normal(size=(5, 4, 3)) * 2), -3, 3).astype(np.float32)
        numbers = rng.integers(0, 60, 40).tolist()

        def function(x: Any, numbers: Any = numbers) -> Any:
            return DRAWS[name](operations.Dice(numbers), x)

        # some primitives occur only in gradients; memplan's own have none
        has_gradient = name not in ("banded", "squares_about_mean")
        for step in (function, jax.grad(lambda x: function(x).sum()))[: 1 + has_gradient]:
            equations = equations_by_rows(step, [x], name)
            for eqn, axes, operands, whole in equations[:2]:
                for axis in known_axes(eqn, axes):
                    check_axis(eqn, axes, axis, operands, whole, rng)
            if equations:
                return
    raise AssertionError(f"nothing drew {name}")


@few
@given(convolutions())
def test_a_convolution(convolution: Convolution) -> None:
    tried = check(convolution.run, convolution.operands, convolution.seed)
    assert tried == {"conv_general_dilated"}


@few
@given(convolutions(negative=False))
def test_the_gradients_of_a_convolution(convolution: Convolution) -> None:
    def gradients(x: Any, w: Any) -> Any:
        result, pull = jax.vjp(convolution.run, x, w)
        return pull(result)

    assert "conv_general_dilated" in check(gradients, convolution.operands, convolution.seed)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 9))]
)
def test_convolutions_of_the_gradients_of_convolutions(number: int) -> None:
    """With groups of batches and of features, dilation on either side, strides that do not divide, under `vmap`."""
    step, args = drawn_step(number)

    def function(*leaves: Any) -> Any:
        return step(*jax.tree.unflatten(jax.tree.structure(args), leaves))

    assert "conv_general_dilated" in check(
        function, jax.tree.leaves(args), number, only="conv_general_dilated"
    )


def test_a_convolution_in_groups_of_batches() -> None:
    """As jax writes the gradient of a grouped one."""
    x, w = floats(0, 4, 7, 5, 2), floats(1, 3, 2, 2, 6)

    def grouped(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            (2, 1),
            ((1, 0), (1, 1)),
            (1, 2),
            (2, 1),
            ("NHWC", "HWIO", "NHWC"),
            batch_group_count=2,
        )

    assert check(grouped, (x, w), windows=4, every=True) == {"conv_general_dilated"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_window_has_the_form_on_which_xla_ends_the_process(size: int) -> None:
    """Of a whole with as many rows as the kernel has, for which the form means what XLA takes it for."""
    deadly = Dim(size, size, size - 1, (0, 0), size, 1), Dim(2, 5, 1, (4, 4), 2, 1)
    convolution = Convolution(list(deadly), 1, 0, size)
    eqn, axes = only(convolution.run, *convolution.operands)
    whole, padded_outside = compat.bind(eqn, convolution.operands), 0
    axis = axes.operands[0][1]
    assert axis is not None
    for span in ((low, high) for low in range(size) for high in range(low + 1, size + 3)):

        def rows_of_result(*operands: Any, span: Span = span) -> list[Any]:
            return run_rows(eqn, axes, axis, span, needed(axes, axis, span), operands)

        windows = windows_of(eqn, axes, axis, span, convolution.operands)
        convolutions_on_rows = [
            eqn_on_rows
            for eqn_on_rows in jax.make_jaxpr(rows_of_result)(*windows).jaxpr.eqns
            if eqn_on_rows.primitive == eqn.primitive
        ]
        rows, padding = windows[0].shape[1], convolutions_on_rows[0].params["padding"][0]
        assert padding != (0, 0) or rows == size
        padded_outside += padding == (0, size - 1)
        compare(eqn, axes, axis, span, rows_of_result(*windows), whole)
    assert padded_outside


def test_what_is_padded_between_rows_is_not_folded_into_that_form() -> None:
    def step(x: Any, w: Any) -> Any:
        wide = lax.pad(x, np.float32(0), [(0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)])
        return lax.conv_general_dilated(
            wide, w, (1, 1), [(0, 0), (2, 2)], dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def of_rows(x: Any, w: Any) -> Any:
        pad, convolution = flatten(jax.make_jaxpr(step)(x, w)).jaxpr.eqns
        axes = axes_of(pad)
        assert axes is not None
        rows = 0, 2 * x.shape[1] - 1
        [wide] = run_rows(pad, axes, 1, rows, needed(axes, 1, rows), [x, np.float32(0)])
        return compat.bind(convolution, [wide, w])

    x, w = floats(0, 2, 3, 2, 3), floats(1, 2, 5, 3, 2)
    jax.jit(of_rows).lower(x, w).compile()  # without a barrier the process ends here


@few
@given(windows())
def test_reductions_over_windows(windows_: Windows) -> None:
    def reductions(x: Any) -> Any:
        sums, greatest = windows_.reduce(x, 0.0, lax.add), windows_.reduce(x, -np.inf, lax.max)
        largest = np.int32(np.iinfo(np.int32).max)
        counted = windows_.reduce((x * 10).astype(jnp.int32), largest, lax.min)

        def reducer(a: Any, b: Any) -> Any:
            return lax.max(a[0], b[0]), a[1] + b[1] - 0.5

        return sums, greatest, counted, *windows_.reduce((x, x * x), (-1.0, 0.5), reducer)

    wanted = {"reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"}
    assert wanted < check(reductions, (windows_.array,), windows_.seed)


@few
@given(windows(negative=False, dilation=1, apart=1), st.sampled_from([lax.max, lax.min]))
def test_the_derivatives_of_extremes_over_windows(windows_: Windows, reducer: Any) -> None:
    start = -np.inf if reducer is lax.max else np.inf

    def derivatives(x: Any) -> Any:
        result, forward = jax.linearize(lambda x: windows_.reduce(x, start, reducer), x)
        return forward(x * x), jax.vjp(lambda x: windows_.reduce(x, start, reducer), x)[1](result)

    tried = check(derivatives, (windows_.array,), windows_.seed)
    assert {"select_and_gather_add", "select_and_scatter_add"} <= tried


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.bfloat16])
@pytest.mark.parametrize("select", [lax.ge_p, lax.le_p])
def test_the_gradient_of_an_extreme_of_a_narrow_type(dtype: Any, select: Any) -> None:
    """With the least and the greatest number of the type among those that are compared with the padding."""
    x = jnp.asarray(np.array([[0, 3, 3, 1, 0, 2], [0, 0, 5, 5, 1, 0]]), dtype)
    x = x.at[0, 0].set(extreme(x.dtype, "min")).at[1, 5].set(extreme(x.dtype, "max"))
    source = jnp.arange(1, 5).reshape(1, 4).astype(dtype)

    def gradient(source: Any, x: Any) -> Any:
        params = {
            "window_dimensions": (2, 3),
            "window_strides": (2, 2),
            "padding": ((0, 0), (1, 2)),
        }
        return lax.select_and_scatter_add_p.bind(source, x, select_prim=select, **params)

    assert check(gradient, (source, x), windows=3) == {"select_and_scatter_add"}


@few
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-2, 3), st.integers(-2, 3), st.integers(0, 2)), min_size=1,
                max_size=3), SEEDS)  # fmt: skip
def test_pad(config: list[tuple[int, int, int, int]], seed: int) -> None:
    rows = [size for size, *_ in config]
    config = [
        (low, max(high, -low - (size - 1) * (within + 1)), within)
        for size, low, high, within in config
    ]
    assert check(lambda x: lax.pad(x, 2.0, config), (floats(seed, *rows),), seed, windows=3) == {
        "pad"
    }


@few
@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2), SEEDS)
def test_slice(start: int, length: int, stride: int, unread: int, seed: int) -> None:
    x = floats(seed, start + length + unread, 3)
    assert check(
        lambda x: lax.slice(x, (start, 0), (start + length, 3), (stride, 1)), (x,), seed, 3
    ) == {"slice"}


@few
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), SEEDS)
def test_concatenate_along_the_axis(rows: list[int], seed: int) -> None:
    operands = [floats(seed + number, size, 2) for number, size in enumerate(rows)]
    assert check(lambda *x: lax.concatenate(x, 0), operands, seed, windows=3) == {"concatenate"}
    tried = check(lambda *x: lax.concatenate([operand > 0 for operand in x], 0), operands, seed)
    assert tried == {"gt", "concatenate"}


def only(function: Callable[..., Any], *args: Any) -> tuple[compat.JaxprEqn, Axes]:
    (eqn,) = flatten(jax.make_jaxpr(function)(*args)).jaxpr.eqns
    axes = axes_of(eqn)
    assert axes is not None
    return eqn, axes


def test_concatenated_zeros_keep_their_sign() -> None:
    zeros = np.array([-0.0, 0.0], np.float32)
    eqn, axes = only(lambda a, b: lax.concatenate([a, b], 0), zeros, zeros)
    (result,) = on_rows(eqn, axes, 0, (0, 4), [zeros, zeros])
    assert np.signbit(result).tolist() == [True, False, True, False]


@few
@given(st.integers(2, 9), st.integers(2, 9), st.integers(-2, 2), st.integers(1, 3), SEEDS)
def test_products_with_banded_matrices(
    result_rows: int, operand_rows: int, offset: int, width: int, seed: int
) -> None:
    x, matrix = floats(seed, 2, operand_rows, 3), floats(seed + 1, result_rows, operand_rows)
    middle = np.arange(result_rows)[:, None] * operand_rows // result_rows
    distance = middle - np.arange(operand_rows) + offset
    matrix[(distance < 0) | (distance >= width)] = 0
    band = Band.of((result_rows, operand_rows), *np.nonzero(matrix), matrix[np.nonzero(matrix)])
    if band is not None:
        operands = x, band.weights

        def product(x: Any, weights: Any) -> Any:
            return banded(x, weights, 1, band.rows, result_rows, jnp.float32)

        np.testing.assert_allclose(
            product(*operands), np.einsum("mg,agb->amb", matrix, x), atol=1e-5
        )
        assert check(product, operands, seed, windows=3, every=True) == {"banded"}


SHAPES = [
    ((4, 6), (6, 4)), ((4, 6), (8, 3)), ((12,), (4, 3)), ((4, 3), (12,)), ((6, 2, 5), (4, 3, 5)), ((1, 6, 4), (3, 8)),
          ((2, 4, 2, 3), (8, 6)), ((5, 2, 9), (5, 6, 3))]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert check(lambda x: lax.reshape(x, after), (floats(0, *before),), windows=3, every=True) == {
        "reshape"
    }


def test_nearest_upsampling_and_its_gradient() -> None:
    def upsampled(x: Any) -> Any:
        wide = jnp.broadcast_to(x[:, None, :, None], (x.shape[0], 2, x.shape[1], 3))
        return (wide.reshape(2 * x.shape[0], 3 * x.shape[1]) ** 2).sum()

    tried = check(jax.grad(upsampled), (floats(0, 4, 5),), every=True)
    assert {"reshape", "broadcast_in_dim", "reduce_sum", "mul"} <= tried


ALIGNED_STEPS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.clip(x, -1.0, 1.0), jnp.tanh(x) * 2).astype(jnp.bfloat16),
    "reductions": lambda x: (x.sum(0), x.max((0, 2)), x.min(1), (x > 0).any(0), (x > 0).all((1, 2)), x.argmax(1)),
    "reductions of whole numbers": lambda x: ((x * 9).astype(jnp.int8).max(0), (x * 9).astype(jnp.int32).sum(1)),
    "products": lambda x: (jnp.einsum("abc,abd->acd", x, x + 1), jnp.einsum("abc,dbc->da", x, x * 2)),
    "scans along another axis": lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 2), lax.cumlogsumexp(x, 1), jnp.sort(x, 1)),
    "scans along the axis": lambda x: (
        [scan(x, 0) for scan in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)],
        [scan((x * 9).astype(jnp.int8), 0) for scan in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)],
    ),
    "parts along another axis": lambda x: (jnp.split(x, 2, 1), lax.concatenate([x, x], 1), jnp.flip(x, 2)),
    "views": lambda x: (x.transpose(2, 0, 1), x[None], lax.broadcast_in_dim(x, (2, *x.shape), (1, 2, 3)), x[:, :1]),
    "dynamic slices": lambda x: (
        lax.dynamic_update_slice(x, lax.dynamic_slice(x, (0, 1, 0), (x.shape[0], 2, x.shape[2])) + 1, (0, 2, 0))
    ),
    "indices": lambda x: (x[:, jnp.array([2, 0]), :], jnp.take_along_axis(x, x.argmax(1, keepdims=True), 1)),
    "rows added by index": lambda x: (
        jnp.ones((3, x.shape[1], x.shape[2])).at[(x[:, 0, 0] * 9).astype(jnp.int32) % 3].add(x)
    ),
    "a row by index": lambda x: jnp.ones((3, 2)).at[(x[..., 0] * 9).astype(jnp.int32) % 3].add(x[..., :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIGNED_STEPS)
def test_equations_that_read_the_rows_that_they_make(name: str) -> None:
    assert check(ALIGNED_STEPS[name], (floats(0, 5, 4, 3),), every=True)


def test_only_what_reads_rows_that_do_not_exist_has_a_fill() -> None:
    x, w = floats(0, 2, 8, 8, 4), floats(0, 3, 3, 4, 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    eqn, axes = only(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), ((1, 1), (0, 0)), (1, 1), (1, 1), numbers
        ),
        x,
        w,
    )
    fills = {
        axis: padding_value(eqn, axes, axis, 0, (x, w))
        for axis in axes.operands[0]
        if axis is not None
    }
    batch, high, wide, features = axes.operands[0]
    assert fills == {batch: None, high: 0, wide: None, features: 0}  # features are summed over
    eqn, axes = only(lambda x: lax.pad(x, 3.0, ((0, 0, 2), (-1, 0, 0), (0, 2, 0), (0, 0, 0))), x)
    assert [padding_value(eqn, axes, axis, 0, (x, 3.0)) for axis in range(4)] == [
        None,
        None,
        3.0,
        None,
    ]


def test_a_window_between_two_rows_is_given_the_next_one() -> None:
    eqn, axes = only(lambda x: lax.pad(x, 0.0, ((0, 0, 4),)), floats(0, 3))
    assert needed(axes, 0, (1, 3)) == {0: (1, 2)}
    (result,) = run_rows(eqn, axes, 0, (1, 3), {0: (1, 2)}, [jnp.full(1, 7.0), jnp.zeros(())])
    assert result.tolist() == [0.0, 0.0]
