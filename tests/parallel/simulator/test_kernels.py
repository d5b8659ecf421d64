"""Every kernel of the simulated devices against jax itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from tests.parallel.simulator.against_jax import RNG, Function, assert_same, floats, ints, plain

X, UNIT, POSITIVE = floats(3, 5), RNG.uniform(-0.95, 0.95, (3, 5)).astype(np.float32), np.abs(floats(3, 5)) + 0.1
ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 0.5, -0.5, 1.5, 2.5, 1e-30, 3e9, -300.7], np.float32)
N, M = ints(3, 5), ints(3, 5)

UNARY: dict[str, tuple[Sequence[Function], np.ndarray]] = {
    "everywhere": (
        [
            *(jnp.arctan, jnp.arcsinh, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.erf, lax.erfc, lax.exp, lax.exp2),
            *(lax.expm1, lax.floor, lax.is_finite, lax.logistic, lax.abs, lax.neg, lax.sign, lax.sin, lax.sinh),
            *(lax.square, lax.tan, lax.tanh, lax.bessel_i0e, lax.bessel_i1e),
            *(lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),),
            *(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),),
            *(lambda x, y=y: lax.integer_pow(x, y) for y in (0, 1, 2, 3, 5, 8, -1, -3)),
        ],
        X,
    ),
    "between -1 and 1": ([lax.acos, lax.asin, lax.atanh, lax.erf_inv], UNIT),
    "above 0": (
        [lax.log, lax.log1p, lax.rsqrt, lax.sqrt, lax.lgamma, lax.digamma, lambda x: lax.acosh(x + 1), jnp.log2],
        POSITIVE,
    ),
    "odd": (
        [
            *(lax.abs, lax.sign, lax.floor, lax.is_finite, lax.sqrt, lax.logistic, lax.neg, lax.exp, lax.tanh),
            *(lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),),
            *(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),),
            *(lambda x, d=d: x.astype(d) for d in ("int8", "uint8", "int32", "uint32", "bool", "float16", "bfloat16")),
            *(lambda x, b=b: lax.reduce_precision(x, *b) for b in ((5, 10), (8, 7), (4, 3), (8, 23), (11, 52), (3, 2))),
        ],
        ODD,
    ),
    "bits": ([lambda x, d=d: lax.bitcast_convert_type(x, d) for d in (jnp.int32, jnp.int8, jnp.uint16)], X),
    "wider bits": ([lambda x: lax.bitcast_convert_type(x, jnp.uint32)], ints(3, 4, low=0, high=200, dtype=np.uint8)),
    "integers": (
        [
            *(lax.abs, lax.sign, lax.neg, lax.clz, lax.population_count, lax.bitwise_not, lambda x: x**3, lax.square),
            *(lambda x, d=d: x.astype(d) for d in ("int8", "uint8", "float32", "bool", "bfloat16")),
        ],
        np.array([0, 1, -1, 7, 300, 2**31 - 1, -(2**31), 123456789], np.int32),
    ),
    "bytes": ([lax.clz, lax.population_count, lax.neg], np.array([0, 1, 200, 255], np.uint8)),
    "booleans": ([lax.bitwise_not, lambda x: x.astype("float32"), lambda x: x.astype("int32")], X > 0),
    "complex": (
        [lax.abs, lax.real, lax.imag, lax.conj, lax.exp, lax.log, lax.sqrt, lax.tanh, lax.sign, lax.logistic],
        (X + 1j * UNIT).astype(np.complex64),
    ),
    "bfloat16": ([lax.exp, lax.tanh, lax.rsqrt, lax.floor, lax.neg, lax.sign], POSITIVE.astype(ml_dtypes.bfloat16)),
    "float16": ([lax.exp, lax.tanh, lax.rsqrt, lax.floor, lax.neg, lax.sign], POSITIVE.astype(np.float16)),
}


@plain
@pytest.mark.parametrize("case", UNARY)
def test_of_one_operand(case: str) -> None:
    functions, x = UNARY[case]
    assert_same(lambda x: [function(x) for function in functions], x)


ARITHMETIC = [lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.div, lax.rem]
COMPARED = [lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]
BITS = [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor]
SHIFTS = [lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic]
WRAPPED = np.array([2**31 - 1, -(2**31), 5, -5, 7, -7], np.int32)
BY = np.array([-1, -1, 0, 0, -2, 2], np.int32)

BINARY: dict[str, tuple[Sequence[Function], Sequence[np.ndarray]]] = {
    "floats": ([*ARITHMETIC, *COMPARED, lax.atan2, lax.nextafter, lax.complex], [X, UNIT]),
    "a scalar": ([*ARITHMETIC, *COMPARED], [X, np.float32(0.7)]),
    "odd": ([*ARITHMETIC, *COMPARED, lax.nextafter], [ODD, ODD[::-1].copy()]),
    "powers": ([lax.pow], [POSITIVE, X]),
    "whole powers": ([lax.pow], [X, M]),
    "special": ([lax.igamma, lax.igammac, lambda a, b: lax.zeta(a + 1.5, b)], [POSITIVE, POSITIVE[::-1].copy()]),
    "polygamma": ([lax.polygamma], [np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 1.5, 3.0], np.float32)]),
    "integers": ([*ARITHMETIC, *COMPARED, *BITS], [WRAPPED, BY]),
    "unsigned": ([*ARITHMETIC, *COMPARED, *BITS], [WRAPPED.view(np.uint32), BY.view(np.uint32)]),
    "shifts": (SHIFTS, [WRAPPED, np.array([0, 1, 31, 32, -1, 40], np.int32)]),
    "small integers": ([*ARITHMETIC, *SHIFTS], [ints(9, dtype=np.int8) * np.int8(13), ints(9, dtype=np.int8)]),
    "booleans": ([*BITS, *COMPARED, lax.max, lax.min], [X > 0, UNIT > 0]),
    "bfloat16": (ARITHMETIC, [X.astype(ml_dtypes.bfloat16), POSITIVE.astype(ml_dtypes.bfloat16)]),
    "float16": (ARITHMETIC, [X.astype(np.float16), POSITIVE.astype(np.float16)]),
    "complex": ([lax.add, lax.mul, lax.div], [(X + 1j).astype(np.complex64), (UNIT - 2j).astype(np.complex64)]),
}


@plain
@pytest.mark.parametrize("case", BINARY)
def test_of_two_operands(case: str) -> None:
    functions, operands = BINARY[case]
    assert_same(lambda x, y: [function(x, y) for function in functions], *operands)


@plain
def test_choices() -> None:
    assert_same(lambda x, y: (jnp.where(x > 0, x, y), lax.select_n(jnp.bool_(True), x, y)), X, UNIT)
    assert_same(lambda which, *cases: lax.select_n(which, *cases), ints(3, 5, low=0, high=3), X, UNIT, POSITIVE)
    assert_same(lambda which, *cases: lax.select_n(which, *cases), np.int32(1), X, UNIT, POSITIVE)
    assert_same(lambda x: (lax.clamp(-0.5, x, 0.5), lax.clamp(x - 1, x * 2, x + 1)), X)


def _reductions(x: Any) -> list[Any]:
    return [f(x, axis=axes) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod) for axes in ((0,), (1, 2), None)]


Y = floats(3, 4, 5)
ALONG: dict[str, tuple[Function, Sequence[Any]]] = {
    "reductions": (_reductions, [Y]),
    "reductions of integers": (_reductions, [ints(3, 4, 5)]),
    "reductions of bfloat16": (_reductions, [(Y + 2).astype(ml_dtypes.bfloat16)]),
    "reductions of float16": (_reductions, [(Y + 2).astype(np.float16)]),
    "reductions of nothing": (lambda x: [x.sum(0), x.prod(0), x.max(1)], [floats(0, 4)]),
    "reductions with NaN": (lambda x: [x.max(), x.min(), x.argmax(), x.argmin()], [ODD]),
    "and, or of booleans": (lambda x: [jnp.any(x, 0), jnp.all(x, (0, 1)), lax.reduce_xor(x, (1,))], [Y > 0]),
    "bits": (lambda x: [lax.reduce_and(x, (0,)), lax.reduce_or(x, (0, 1)), lax.reduce_xor(x, (1,))], [ints(3, 4)]),
    "first of the largest": (
        lambda x: [lax.argmax(x, 1, np.int32), lax.argmin(x, 0, np.uint8), jnp.argmax(x)],
        [ints(6, 7, low=0, high=3)],
    ),
    "cumulative": (
        lambda x: [f(x, a, r) for f in CUMULATIVE[:4] for a, r in ((0, False), (2, True))],
        [ints(3, 4, 5)],
    ),
    "cumulative floats": (lambda x: [f(x, a, r) for f in CUMULATIVE for a, r in ((1, False), (2, True))], [Y]),
    "sorts": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), [ints(9, 2, low=0, high=3), floats(9, 2)]),
    "sorts of two keys": (lambda x, y: lax.sort((x, y, x + y), num_keys=2), [ints(2, 30, high=-5), floats(2, 30)]),
    "sorts of odd numbers": (lambda x: lax.sort((x, jnp.arange(12)), num_keys=1), [ODD]),
    "sorts of bfloat16": (jnp.sort, [Y.astype(ml_dtypes.bfloat16)]),
    "argsort": (lambda x: (jnp.argsort(x, 1), jnp.median(x, 0)), [Y]),
    "top k": (lambda x: [*lax.top_k(x, 3), *lax.top_k(x.T, 2)], [Y]),
    "top k of integers": (lambda x: lax.top_k(x, 5), [ints(4, 9, low=0, high=3)]),
    "top k of odd numbers": (lambda x: lax.top_k(x, 12), [ODD]),
    "top k along another": (lambda x: lax.top_k(x, 2, axis=1), [Y]),
}
CUMULATIVE = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]

MOVED: dict[str, tuple[Function, Sequence[Any]]] = {
    "transpose": (lambda x: (x.transpose(2, 0, 1), jnp.moveaxis(x, 0, 1)), [Y]),
    "broadcast": (lambda x: (lax.broadcast_in_dim(x, (3, 2, 5), (0, 2)), jnp.broadcast_to(x[:1], (3, 5))), [X]),
    "reshape": (lambda x: (x.reshape(5, 3), x[None, :, None], jnp.squeeze(x[:1]), lax.reshape(x, (15,), (1, 0))), [X]),
    "join": (lambda x, y: (jnp.concatenate([x, y, x], 1), jnp.stack([x, y], 1)), [X, UNIT]),
    "part": (lambda x: (*jnp.split(x, [1, 3], 1), *lax.split(x, (1, 2)), *jnp.unstack(x, axis=1)), [X]),
    "tile, repeat": (lambda x: (jnp.tile(x, (2, 1, 3)), jnp.repeat(x, 2, 1)), [X]),
    "reverse": (lambda x: (jnp.flip(x), lax.rev(x, (0,))), [X]),
    "pad": (
        lambda x: [lax.pad(x, np.float32(7), c) for c in (((1, 2, 1), (0, -1, 2)), ((-1, 0, 0), (-2, -2, 1)))],
        [X],
    ),
    "pad nothing": (lambda x: lax.pad(x, np.float32(7), ((1, 2, 1), (0, 1, 2))), [floats(0, 2)]),
    "slices": (lambda x: (x[1:, ::2], lax.slice(x, (0, 1), (3, 5), (2, 3)), x[-1]), [X]),
    "slices at": (
        lambda x, i: [lax.dynamic_slice(x, (i + d, i - d), (2, 3)) for d in range(-4, 5, 2)],
        [X, np.int32(1)],
    ),
    "updates at": (
        lambda x, i: [lax.dynamic_update_slice(x, x[:2, :3] * 2, (i + d, i - d)) for d in range(-4, 5, 2)],
        [X, np.int32(1)],
    ),
    "iota": (
        lambda x: (lax.iota(np.int8, 5), lax.broadcasted_iota(np.float32, (2, 3, 4), 1), jnp.eye(3) + x),
        [X[0, 0]],
    ),
}


@plain
@pytest.mark.parametrize("case", [*ALONG, *MOVED])
def test_along_and_moved(case: str) -> None:
    function, args = {**ALONG, **MOVED}[case]
    assert_same(function, *args)


PRODUCTS: dict[str, tuple[Function, Sequence[Any]]] = {
    "matrices": (jnp.matmul, [floats(3, 4), floats(4, 5)]),
    "vectors": (jnp.dot, [floats(4), floats(4)]),
    "batches": (lambda x, y: jnp.einsum("abcd,cbed->bcae", x, y), [floats(2, 3, 4, 5), floats(4, 3, 6, 5)]),
    "outer": (lambda x, y: jnp.einsum("ab,c->cab", x, y), [floats(2, 3), floats(4)]),
    "integers": (jnp.matmul, [ints(3, 4, high=2**30), ints(4, 5, high=2**30)]),
    "wider": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        [ints(3, 4, low=-100, high=100, dtype=np.int8), ints(4, 5, low=-100, high=100, dtype=np.int8)],
    ),
    "bfloat16": (jnp.matmul, [floats(3, 40, dtype=ml_dtypes.bfloat16), floats(40, 5, dtype=ml_dtypes.bfloat16)]),
    "bfloat16 to float32": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        [floats(3, 40, dtype=ml_dtypes.bfloat16), floats(40, 5, dtype=ml_dtypes.bfloat16)],
    ),
    "nothing": (jnp.matmul, [floats(3, 0), floats(0, 2)]),
}

NHWC, ANY = ("NHWC", "HWIO", "NHWC"), ("CNWH", "WIOH", "WNHC")
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 6, 7, 3), (3, 2, 3, 4), {"dimension_numbers": NHWC, "padding": "SAME"}),
    "strides": ((2, 6, 7, 3), (3, 2, 3, 4), {"dimension_numbers": NHWC, "padding": "VALID", "window_strides": (2, 3)}),
    "cut": ((2, 6, 7, 3), (3, 2, 3, 4), {"dimension_numbers": NHWC, "padding": ((-1, 2), (3, -2))}),
    "dilated": (
        (2, 6, 7, 3),
        (3, 2, 3, 4),
        {"dimension_numbers": NHWC, "padding": ((1, 0), (2, 1)), "lhs_dilation": (2, 3), "rhs_dilation": (1, 2)},
    ),
    "groups": ((2, 6, 7, 6), (3, 2, 2, 9), {"dimension_numbers": NHWC, "padding": "SAME", "feature_group_count": 3}),
    "batch groups": (
        (6, 6, 7, 2),
        (3, 2, 2, 9),
        {"dimension_numbers": NHWC, "padding": "SAME", "batch_group_count": 3},
    ),
    "layouts": ((3, 2, 7, 6), (2, 3, 4, 3), {"dimension_numbers": ANY, "padding": "SAME"}),
    "one dimension": ((2, 3, 9), (4, 3, 3), {"dimension_numbers": ("NCH", "OIH", "NCH"), "padding": "SAME"}),
    "three dimensions": (
        (2, 3, 4, 5, 6),
        (4, 3, 2, 2, 3),
        {"dimension_numbers": ("NCDHW", "OIDHW", "NCDHW"), "padding": "SAME", "window_strides": (1, 2, 1)},
    ),
    "no dimension": ((2, 3), (4, 3), {"dimension_numbers": ("NC", "OI", "NC"), "padding": ()}),
}


@plain
@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: str) -> None:
    function, args = PRODUCTS[case]
    assert_same(function, *args)


@plain
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_their_gradients(case: str) -> None:
    x, kernel, options = CONVOLUTIONS[case]
    options = {"window_strides": (1,) * (len(x) - 2), **options}

    def function(x: Any, kernel: Any) -> Any:
        out, back = jax.vjp(lambda *both: lax.conv_general_dilated(*both, **options), x, kernel)
        return out, back(out)

    assert_same(function, floats(*x), floats(*kernel), tolerance=1e-4)


WINDOWS = [
    ((2, 3), (1, 1), "SAME", (1, 1), (1, 1)),
    ((2, 2), (2, 1), "VALID", (1, 1), (1, 1)),
    ((3, 2), (1, 2), ((1, 2), (0, 1)), (2, 1), (1, 2)),
    ((1, 3), (2, 2), ((0, 0), (2, 2)), (1, 3), (2, 1)),
]


@plain
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: Any) -> None:
    def function(x: Any, n: Any) -> Any:
        by = [(-np.inf, lax.max), (np.inf, lax.min), (0.0, lax.add)]
        return [lax.reduce_window(x, np.float32(start), f, *window) for start, f in by], lax.reduce_window(
            n, 0, lax.add, *window
        )

    assert_same(function, floats(6, 7), ints(6, 7))


@plain
def test_bodies_of_one_equation() -> None:
    xor, fold = lambda a, b: a ^ b, lambda a, b: lax.mul(b, a)
    assert_same(lambda n: lax.reduce_window(n, np.int32(3), xor, (2, 3), (1, 2), "SAME"), N)
    assert_same(lambda x: lax.reduce_window(x, np.float32(2), fold, (2, 3), (1, 2), ((1, 1), (0, 2))), X)
    assert_same(lambda x: lax.reduce(x, np.float32(2), fold, (1,)), X)


@plain
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_and_tangents_of_pools(whole: bool) -> None:
    def pooled(x: Any) -> Any:
        largest = lax.reduce_window(x, -np.inf, lax.max, (1, 3, 2), (1, 2, 1), "SAME")
        return (largest * jnp.arange(largest.size).reshape(largest.shape)).sum()

    x = (ints(2, 6, 7, low=0, high=3) if whole else floats(2, 6, 7)).astype(np.float32)
    assert_same(lambda x: (jax.grad(pooled)(x), jax.jvp(pooled, (x,), (x + 1,))), x)


def _indices(shape: Sequence[int], count: Sequence[int]) -> np.ndarray:
    """Some of them outside."""
    return np.stack([RNG.integers(-2, size + 2, count) for size in shape], -1).astype(np.int32)


GATHERS: dict[str, tuple[tuple[int, ...], np.ndarray, lax.GatherDimensionNumbers, tuple[int, ...]]] = {
    "elements": ((5, 6), _indices((5, 6), (4, 3)), lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1)),
    "rows": ((5, 6), _indices((5,), (4,)), lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 6)),
    "windows": ((5, 6, 2), _indices((6, 5), (4, 3)), lax.GatherDimensionNumbers((0, 2), (2,), (1, 0)), (2, 3, 1)),
    "batches": (
        (4, 5, 3, 6),
        _indices((5, 6), (3, 2, 4)),
        lax.GatherDimensionNumbers((3,), (1,), (1, 3), (0, 2), (2, 0)),
        (1, 1, 1, 2),
    ),
    "a single element": ((5, 6), _indices((5, 6), ()), lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1)),
    "a single window": ((5, 6), _indices((6,), ()), lax.GatherDimensionNumbers((0, 1), (), (1,)), (5, 2)),
}
MODES = ["clip", "fill", "promise_in_bounds"]


def _within(indices: np.ndarray, mode: str) -> np.ndarray:
    return np.clip(indices, 0, 2) if mode == "promise_in_bounds" else indices


@plain
@pytest.mark.parametrize("case", GATHERS)
def test_gathers(case: str) -> None:
    shape, indices, numbers, sizes = GATHERS[case]

    def function(x: Any, n: Any) -> Any:
        first = [lax.gather(x, _within(indices, mode), numbers, sizes, mode=mode) for mode in MODES]
        return first, lax.gather(n, indices, numbers, sizes, mode="fill", fill_value=-7)

    assert_same(function, floats(*shape), ints(*shape))


SCATTERS = [lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max]


@plain
@pytest.mark.parametrize("case", GATHERS)
def test_scatters(case: str) -> None:
    shape, indices, numbers, sizes = GATHERS[case]
    given = jax.eval_shape(lambda x: lax.gather(x, indices, numbers, sizes), jax.ShapeDtypeStruct(shape, np.float32))
    to = _reverse(numbers)

    def function(x: Any, updates: Any) -> Any:
        return [_scattered(x, _within(indices, mode), updates, to, mode) for mode in MODES]

    assert_same(function, floats(*shape) * 4, floats(*given.shape) * 4, tolerance=1e-4)


def _scattered(x: Any, indices: Any, updates: Any, to: lax.ScatterDimensionNumbers, mode: str) -> list[Any]:
    both = ((x, updates), (x.astype(np.int32), updates.astype(np.int32)))
    added = [scatter(a, indices, b, to, mode=mode) for scatter in SCATTERS for a, b in both]
    return [*added, lax.scatter(x, indices, jnp.full_like(updates, 7), to, mode=mode)]


def _reverse(numbers: lax.GatherDimensionNumbers) -> lax.ScatterDimensionNumbers:
    return lax.ScatterDimensionNumbers(
        update_window_dims=numbers.offset_dims,
        inserted_window_dims=numbers.collapsed_slice_dims,
        scatter_dims_to_operand_dims=numbers.start_index_map,
        operand_batching_dims=numbers.operand_batching_dims,
        scatter_indices_batching_dims=numbers.start_indices_batching_dims,
    )


@plain
def test_indexing() -> None:
    i, j = ints(4, low=-8, high=8), ints(4, low=-8, high=8)
    assert_same(lambda x, i, j: (x[i], x[i, j], x[:, j], jnp.take_along_axis(x, i[None] % 3, 1)), X, i, j)
    assert_same(lambda x, i, j: (x.at[i].add(1), x.at[i, j].max(2), x.at[1].set(0), x.at[:, 1:3].mul(2)), X, i, j)
    assert_same(lambda x: x.at[jnp.array([0, 0, 1])].add(x), floats(3, 5, dtype=ml_dtypes.bfloat16))
    assert_same(jax.grad(lambda x, i: (jnp.take(x, i, 0) ** 2).sum()), X, i)


KEY = jax.random.key(7)
DRAWS: dict[str, Function] = {
    "bits": lambda key: [jax.random.bits(key, (3, 5), d) for d in (np.uint8, np.uint16, np.uint32)],
    "uniform": lambda key: (jax.random.uniform(key, (3, 5)), jax.random.uniform(key)),
    "normal": lambda key: jax.random.normal(key, (3, 50)),
    "randint": lambda key: jax.random.randint(key, (30,), -5, 12),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (30,)),
    "permutation": lambda key: (jax.random.permutation(key, 30), jax.random.permutation(key, X, 1)),
    "split": lambda key: (jax.random.split(key, 3), jax.random.split(key, (2, 2)), jax.random.split(key)[1]),
    "fold in": lambda key: (jax.random.fold_in(key, 5), jax.random.fold_in(key, jnp.uint32(2**32 - 1))),
    "categorical": lambda key: jax.random.categorical(key, X),
    "moved": lambda key: jax.random.split(key, 6)[jax.random.permutation(key, 6)][::-1].reshape(2, 3).T[1:, 0],
    "made": lambda key: (jax.random.clone(key), jax.random.key(-3), jax.random.PRNGKey(2**31 - 1)),
    "raw": lambda key: jax.random.uniform(jax.random.split(jax.random.key_data(key))[1], (3,)),
}


@plain
@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("case", DRAWS)
def test_random_numbers(case: str, vmapped: bool) -> None:
    """Only `erf_inv` is not to the bit."""
    function = jax.vmap(DRAWS[case]) if vmapped else DRAWS[case]
    assert_same(function, jax.random.split(KEY, 3) if vmapped else KEY, tolerance=2e-5 if case == "normal" else 0)


@plain
def test_a_key_for_every_seed() -> None:
    assert_same(jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n)), ints(5), ints(5, low=0))
    assert_same(lambda keys: jnp.where(jnp.array([True, False]), keys, keys[::-1]), jax.random.split(KEY))


def test_by_jax() -> None:
    """What has no kernel, other generators among it."""
    assert_same(lambda x: jnp.linalg.cholesky(x @ x.T + 5 * jnp.eye(3)), X)
    assert_same(lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a + b * b, (1, 2), (1, 2), "VALID"), X)
    assert_same(lambda x: x.at[0].apply(jnp.sin), X)
    rbg = jax.random.key(3, impl="rbg")
    assert_same(lambda key: (jax.random.split(key, 3)[1:], jax.random.uniform(key, (3,))), rbg, tolerance=0)
