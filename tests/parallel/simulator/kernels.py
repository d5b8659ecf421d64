"""Primitives of jax as plain NumPy functions: nothing is dispatched and nothing compiled.

`KERNELS[name](eqn, *operands)` gives the result, or a list where the primitive has several, and `computed` brings it to
the types of the equation. A `Keys` is an array of typed keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import scipy.special as special
from jax.lax import GatherScatterMode, RoundingMethod

from memplan.program import compat

Array = Any
Kernel = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Keys:
    """Typed keys, as their words `[..., number of words]`."""

    words: np.ndarray
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[:-1]

    @functools.cached_property
    def packed(self) -> np.ndarray:
        """One number per key, which can be moved about like any other."""
        count = self.words.shape[-1]
        kind = np.dtype(np.uint64) if count == 2 else np.dtype((np.void, 4 * count))
        return np.ascontiguousarray(self.words).view(kind)[..., 0]

    @staticmethod
    def unpacked(packed: np.ndarray, dtype: Any) -> Keys:
        return Keys(np.array(packed[..., None], order="C").view(np.uint32), dtype)

    @property
    def in_jax(self) -> jax.Array:
        return jax.random.wrap_key_data(self.words, impl=self.dtype)


def as_value(value: Any, aval: Any) -> Any:
    """An input or a constant as it is computed with; the same object where it is that already."""
    if isinstance(value, Keys) or not isinstance(aval.dtype, np.dtype):
        return value if isinstance(value, Keys) else Keys(np.asarray(jax.random.key_data(value)), aval.dtype)
    return np.asarray(value, aval.dtype)


def computed(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, without jax where there is a kernel for it."""
    name = eqn.primitive.name
    if name in KERNELS:
        moved = [one.packed if isinstance(one, Keys) else one for one in operands]
        found = KERNELS[name](eqn, *moved)
    elif name in RANDOM and _is_drawn_here(eqn):
        found = RANDOM[name](eqn, *operands)
    else:
        return by_jax(eqn, operands)
    found = found if eqn.primitive.multiple_results else [found]
    return [_typed(eqn, one, var.aval) for one, var in zip(found, eqn.outvars, strict=True)]


def _typed(eqn: compat.JaxprEqn, value: Any, aval: Any) -> Any:
    if not isinstance(value, Keys):
        keys = not isinstance(aval.dtype, np.dtype)
        value = Keys.unpacked(np.asarray(value), aval.dtype) if keys else np.asarray(value, aval.dtype)
    assert value.shape == aval.shape, f"{eqn.primitive.name}: {value.shape} is not {aval.shape}"
    return value


def by_jax(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """What has no kernel: slow, as it is compiled for every new shape."""
    with compat.user_context(eqn):
        arrays = [one.in_jax if isinstance(one, Keys) else jax.numpy.asarray(one) for one in operands]
        results = compat.bind(eqn, arrays)
    return [as_value(one, var.aval) for one, var in zip(results, eqn.outvars, strict=True)]


# Numbers of all kinds


@functools.cache
def is_kind(dtype: np.dtype, kind: Any) -> bool:
    """jax's own sub-types, which know bfloat16 and the like."""
    return jax.dtypes.issubdtype(dtype, kind)


@functools.cache
def _computed_in(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if is_kind(dtype, np.floating) and dtype.itemsize < 4 else dtype


def wide(x: Array) -> Array:
    """Floats of fewer than 32 bits as float32, which is what they are computed in."""
    return x.astype(_computed_in(x.dtype), copy=False)


def _dtype(eqn: compat.JaxprEqn) -> np.dtype:
    return eqn.outvars[0].aval.dtype


def _shape(eqn: compat.JaxprEqn) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape


@functools.cache
def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


@functools.cache
def lowest(dtype: np.dtype) -> Any:
    """What every maximum starts from."""
    if dtype.kind == "b":
        return False
    return -np.inf if is_kind(dtype, np.inexact) else jax.dtypes.iinfo(dtype).min


@functools.cache
def highest(dtype: np.dtype) -> Any:
    """What every minimum starts from."""
    if dtype.kind == "b":
        return True
    return np.inf if is_kind(dtype, np.inexact) else jax.dtypes.iinfo(dtype).max


# Element by element


def _smooth(function: Callable[..., Array]) -> Kernel:
    return lambda eqn, *operands: function(*(wide(x) for x in operands))


def _exact(function: Callable[..., Array]) -> Kernel:
    return lambda eqn, *operands: function(*operands)


def _sign(x: Array) -> Array:
    return np.where(x == 0, x, np.sign(x))


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x)) if x.dtype.kind == "c" else special.expit(x)


def _mul(eqn: compat.JaxprEqn, x: Array, y: Array) -> Array:
    dtype = _dtype(eqn)
    return np.multiply(x.astype(dtype, copy=False), y.astype(dtype, copy=False))


def _div(eqn: compat.JaxprEqn, x: Array, y: Array) -> Array:
    if not is_kind(x.dtype, np.integer):
        return np.divide(wide(x), wide(y))
    quotient = np.floor_divide(x - np.fmod(x, y), y)
    return np.where(y == 0, np.array(-1).astype(x.dtype), quotient)


def _rem(x: Array, y: Array) -> Array:
    rest = np.fmod(x, y)
    return np.where(y == 0, x, rest) if is_kind(x.dtype, np.integer) else rest


def _pow(x: Array, y: Array) -> Array:
    if is_kind(x.dtype, np.integer):
        return np.where(y < 0, 0, np.power(x, np.maximum(y, 0)))
    return np.power(x, y)


def _integer_pow(eqn: compat.JaxprEqn, x: Array) -> Array:
    """By squaring, as jax writes it."""
    exponent, x = eqn.params["y"], wide(x)
    if exponent == 0:
        return np.ones_like(x)
    result, square, left = None, x, abs(exponent)
    while left:
        if left & 1:
            result = square if result is None else result * square
        left >>= 1
        square = square * square if left else square
    return 1 / result if exponent < 0 else result


def _round(eqn: compat.JaxprEqn, x: Array) -> Array:
    x = wide(x)
    if eqn.params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN:
        return np.rint(x)
    whole = np.trunc(x)
    return np.copysign(np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole), x)


def _complex(eqn: compat.JaxprEqn, real: Array, imag: Array) -> Array:
    made = np.empty(_shape(eqn), _dtype(eqn))
    made.real, made.imag = real, imag
    return made


def _clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _select_n(which: Array, *cases: Array) -> Array:
    if which.dtype.kind == "b":
        return np.where(which, cases[-1], cases[0])
    result = cases[0]
    for number, case in enumerate(cases[1:], 1):
        result = np.where(which >= number, case, result)
    return result


def _shift_right_logical(x: Array, by: Array) -> Array:
    unsigned = _unsigned(x.dtype)
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


def _population_count(x: Array) -> Array:
    return np.bitwise_count(x.view(_unsigned(x.dtype)))


def _clz(x: Array) -> Array:
    bits, left = 8 * x.dtype.itemsize, x.view(_unsigned(x.dtype))
    for shift in (1, 2, 4, 8, 16, 32):
        left = left | (left >> min(shift, bits - 1))
    return bits - np.bitwise_count(left).astype(x.dtype)


def _convert(eqn: compat.JaxprEqn, x: Array) -> Array:
    dtype = _dtype(eqn)
    if dtype.kind == "b":
        return x != 0
    if x.dtype.kind == "c" and not is_kind(dtype, np.complexfloating):
        x = x.real
    return _saturated(x, dtype) if is_kind(x.dtype, np.floating) and is_kind(dtype, np.integer) else x.astype(dtype)


def _saturated(x: Array, dtype: np.dtype) -> Array:
    x, limits = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64)), jax.dtypes.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    inside = np.where((x > low) & (x < high), x, 0).astype(dtype)
    return np.where(x >= high, np.array(high, dtype), np.where(x <= low, np.array(low, dtype), inside))


def _bitcast(eqn: compat.JaxprEqn, x: Array) -> Array:
    dtype, x = _dtype(eqn), np.array(x, order="C")
    if dtype.itemsize < x.dtype.itemsize:
        return x[..., None].view(dtype)
    return x.view(dtype).reshape(_shape(eqn))


def _reduce_precision(eqn: compat.JaxprEqn, x: Array) -> Array:
    """On the bits: rounded to even, too large is infinite, subnormal is zero."""
    exponent_bits, mantissa_bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    info, unsigned = jax.numpy.finfo(x.dtype), _unsigned(x.dtype)
    stored, bias = info.nmant, (1 << (info.nexp - 1)) - 1
    bits, dropped = x.view(unsigned), info.nmant - mantissa_bits
    sign = bits & unsigned.type(1 << (info.bits - 1))
    if dropped > 0:
        last = (bits >> unsigned.type(dropped)) & unsigned.type(1)
        bits = (bits + unsigned.type((1 << (dropped - 1)) - 1) + last) >> unsigned.type(dropped)
        bits = bits << unsigned.type(dropped)
    if exponent_bits < info.nexp:
        exponent = (bits >> unsigned.type(stored)) & unsigned.type((1 << info.nexp) - 1)
        reach = (1 << (exponent_bits - 1)) - 1
        infinite = unsigned.type(((1 << info.nexp) - 1) << stored)
        bits = np.where(exponent > bias + reach, sign | infinite, np.where(exponent <= bias - reach, sign, bits))
    return np.where(np.isnan(x), x, np.asarray(bits, unsigned).view(x.dtype))


ELEMENTWISE: dict[str, Kernel] = {
    **{
        name: _smooth(function)
        for name, function in {
            "acos": np.arccos,
            "acosh": np.arccosh,
            "asin": np.arcsin,
            "asinh": np.arcsinh,
            "atan": np.arctan,
            "atan2": np.arctan2,
            "atanh": np.arctanh,
            "bessel_i0e": special.i0e,
            "bessel_i1e": special.i1e,
            "cbrt": np.cbrt,
            "ceil": np.ceil,
            "clamp": _clamp,
            "cos": np.cos,
            "cosh": np.cosh,
            "digamma": special.digamma,
            "erf": special.erf,
            "erf_inv": special.erfinv,
            "erfc": special.erfc,
            "exp": np.exp,
            "exp2": np.exp2,
            "expm1": np.expm1,
            "floor": np.floor,
            "igamma": special.gammainc,
            "igammac": special.gammaincc,
            "is_finite": np.isfinite,
            "lgamma": special.gammaln,
            "log": np.log,
            "log1p": np.log1p,
            "log2": np.log2,
            "logistic": _logistic,
            "max": np.maximum,
            "min": np.minimum,
            "one_minus_square": lambda x: 1 - x * x,
            "polygamma": special.polygamma,
            "pow": _pow,
            "regularized_incomplete_beta": special.betainc,
            "rem": _rem,
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "sign": _sign,
            "sin": np.sin,
            "sinh": np.sinh,
            "sqrt": np.sqrt,
            "square": np.square,
            "tan": np.tan,
            "tanh": np.tanh,
            "zeta": special.zeta,
        }.items()
    },
    **{
        name: _exact(function)
        for name, function in {
            "abs": np.abs,
            "add": np.add,
            "add_any": np.add,
            "and": np.bitwise_and,
            "clz": _clz,
            "conj": np.conj,
            "eq": np.equal,
            "ge": np.greater_equal,
            "gt": np.greater,
            "imag": np.imag,
            "le": np.less_equal,
            "lt": np.less,
            "ne": np.not_equal,
            "neg": np.negative,
            "nextafter": np.nextafter,
            "not": np.invert,
            "or": np.bitwise_or,
            "population_count": _population_count,
            "real": np.real,
            "select_n": _select_n,
            "shift_left": np.left_shift,
            "shift_right_arithmetic": np.right_shift,
            "shift_right_logical": _shift_right_logical,
            "sub": np.subtract,
            "xor": np.bitwise_xor,
        }.items()
    },
    "bitcast_convert_type": _bitcast,
    "complex": _complex,
    "convert_element_type": _convert,
    "div": _div,
    "integer_pow": _integer_pow,
    "mul": _mul,
    "reduce_precision": _reduce_precision,
    "round": _round,
}


# Along dimensions


def _reduced(ufunc: np.ufunc, start: Callable[[np.dtype], Any] | None = None) -> Kernel:
    def kernel(eqn: compat.JaxprEqn, x: Array) -> Array:
        return _over(ufunc, start, wide(x), eqn.params["axes"])

    return kernel


def _over(ufunc: np.ufunc, start: Callable[[np.dtype], Any] | None, x: Array, axes: Sequence[int]) -> Array:
    more = {"initial": start(x.dtype)} if start else {}
    return ufunc.reduce(x, axis=tuple(axes), dtype=x.dtype, **more)


def _cumulative(ufunc: np.ufunc) -> Kernel:
    def kernel(eqn: compat.JaxprEqn, x: Array) -> Array:
        axis, reverse = eqn.params["axis"], eqn.params["reverse"]
        x = wide(np.flip(x, axis) if reverse else x)
        result = ufunc.accumulate(x, axis=axis, dtype=x.dtype)
        return np.flip(result, axis) if reverse else result

    return kernel


def _extreme(function: Callable[..., Array]) -> Kernel:
    return lambda eqn, x: function(wide(x), axis=eqn.params["axes"][0])


def _sort(eqn: compat.JaxprEqn, *operands: Array) -> list[Array]:
    """`lexsort` is stable, has the least of its keys first and NaN last, and does not know -0."""
    axis = eqn.params["dimension"]
    order = np.lexsort([wide(x) for x in operands[: eqn.params["num_keys"]][::-1]], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in operands]


def _top_k(eqn: compat.JaxprEqn, x: Array) -> list[Array]:
    axis, k = eqn.params["axis"], eqn.params["k"]
    backwards = np.flip(_in_total_order(wide(x)), axis)
    order = np.flip(np.argsort(backwards, axis=axis, stable=True), axis)
    first = x.shape[axis] - 1 - np.take(order, range(k), axis)
    return [np.take_along_axis(x, first, axis), first]


def _in_total_order(x: Array) -> Array:
    """Integers that compare as floats do in `top_k`: -0 before 0, NaN at the ends."""
    if not is_kind(x.dtype, np.floating):
        return x
    signed = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")
    return np.where(signed < 0, signed ^ jax.dtypes.iinfo(signed.dtype).max, signed)


ALONG: dict[str, Kernel] = {
    "argmax": _extreme(np.argmax),
    "argmin": _extreme(np.argmin),
    "cumlogsumexp": _cumulative(np.logaddexp),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "cumprod": _cumulative(np.multiply),
    "cumsum": _cumulative(np.add),
    "reduce_and": _reduced(np.bitwise_and),
    "reduce_max": _reduced(np.maximum, lowest),
    "reduce_min": _reduced(np.minimum, highest),
    "reduce_or": _reduced(np.bitwise_or),
    "reduce_prod": _reduced(np.multiply),
    "reduce_sum": _reduced(np.add),
    "reduce_xor": _reduced(np.bitwise_xor),
    "sort": _sort,
    "top_k": _top_k,
}


# Moved about


def _broadcast_in_dim(eqn: compat.JaxprEqn, x: Array) -> Array:
    shape = [1] * len(_shape(eqn))
    for size, dim in zip(x.shape, eqn.params["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), _shape(eqn))


def _reshape(eqn: compat.JaxprEqn, x: Array) -> Array:
    order = eqn.params.get("dimensions")
    return (x if order is None else x.transpose(order)).reshape(_shape(eqn))


def _along(numbers: Array, dim: int, rank: int) -> Array:
    """To be broadcast: they run along one dimension."""
    return numbers.reshape([-1] + [1] * (rank - dim - 1))


def _iota(eqn: compat.JaxprEqn) -> Array:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    return np.broadcast_to(_along(np.arange(shape[dim]).astype(_dtype(eqn)), dim, len(shape)), shape)


def _split(eqn: compat.JaxprEqn, x: Array) -> list[Array]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])


def _unstack(eqn: compat.JaxprEqn, x: Array) -> list[Array]:
    return list(np.moveaxis(x, eqn.params["axis"], 0))


def _slice(eqn: compat.JaxprEqn, x: Array) -> Array:
    params = eqn.params
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _window_at(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    """Moved to where it fits, if it does not."""
    firsts = [min(max(int(at), 0), all_ - size) for at, all_, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(eqn: compat.JaxprEqn, x: Array, *starts: Array) -> Array:
    return x[_window_at(x.shape, eqn.params["slice_sizes"], starts)]


def _dynamic_update_slice(eqn: compat.JaxprEqn, x: Array, update: Array, *starts: Array) -> Array:
    changed = x.copy()
    changed[_window_at(x.shape, update.shape, starts)] = update
    return changed


Padding = Sequence[tuple[int, int, int]]


def _config(padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Padding:
    return [(low, high, by - 1) for (low, high), by in zip(padding, dilation, strict=True)]


def padded(x: Array, config: Padding, fill: Any) -> Array:
    """`lax.pad`: low, high (either may be negative) and interior, per dimension."""
    if all(not low and not high and not inner for low, high, inner in config):
        return x
    dilated = [max(size + (size - 1) * inner, 0) for size, (_, _, inner) in zip(x.shape, config, strict=True)]
    whole, inside, cut = [], [], []
    for size, (low, high, inner) in zip(dilated, config, strict=True):
        before, after = max(low, 0), max(high, 0)
        whole.append(before + size + after)
        inside.append(slice(before, before + size, inner + 1))
        cut.append(slice(max(-low, 0), whole[-1] - max(-high, 0)))
    made = np.full(whole, fill, x.dtype)
    made[tuple(inside)] = x
    return made[tuple(cut)]


MOVED: dict[str, Kernel] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "empty": lambda eqn: np.zeros(_shape(eqn), _dtype(eqn)),
    "empty2": lambda eqn, *_: np.zeros(_shape(eqn), _dtype(eqn)),
    "expand_dims": _reshape,
    "iota": _iota,
    "pad": lambda eqn, x, fill: padded(x, eqn.params["padding_config"], fill),
    "reshape": _reshape,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _slice,
    "split": _split,
    "squeeze": lambda eqn, x: x.reshape(_shape(eqn)),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "tile": lambda eqn, x: np.tile(x, eqn.params["reps"]),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "unstack": _unstack,
}


# Products


def _dot_general(eqn: compat.JaxprEqn, x: Array, y: Array) -> Array:
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x_own = [d for d in range(x.ndim) if d not in x_sum and d not in x_batch]
    y_own = [d for d in range(y.ndim) if d not in y_sum and d not in y_batch]
    batch, summed = math.prod(x.shape[d] for d in x_batch), math.prod(x.shape[d] for d in x_sum)
    rows, columns = math.prod(x.shape[d] for d in x_own), math.prod(y.shape[d] for d in y_own)
    dtype = np.promote_types(_computed_in(_dtype(eqn)), np.promote_types(wide(x).dtype, wide(y).dtype))
    x = x.transpose(*x_batch, *x_own, *x_sum).reshape(batch, rows, summed).astype(dtype, copy=False)
    y = y.transpose(*y_batch, *y_sum, *y_own).reshape(batch, summed, columns).astype(dtype, copy=False)
    return np.matmul(x, y).reshape(_shape(eqn))


def windows(x: Array, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Array:
    """Views `[..., positions, window]` over the last dimensions."""
    lead, steps = x.ndim - len(sizes), x.strides[x.ndim - len(sizes) :]
    counts = [
        max((n - (size - 1) * apart - 1) // stride + 1, 0)
        for n, size, stride, apart in zip(x.shape[lead:], sizes, strides, dilation, strict=True)
    ]
    moves = [step * stride for step, stride in zip(steps, strides, strict=True)]
    inner = [step * apart for step, apart in zip(steps, dilation, strict=True)]
    shape = (*x.shape[:lead], *counts, *sizes)
    return np.lib.stride_tricks.as_strided(x, shape, (*x.strides[:lead], *moves, *inner), writeable=False)


def _conv(eqn: compat.JaxprEqn, x: Array, kernel: Array) -> Array:
    """One matrix product per group, of all the windows."""
    params, numbers, dtype = eqn.params, eqn.params["dimension_numbers"], _computed_in(_dtype(eqn))
    x = x.transpose(numbers.lhs_spec).astype(dtype, copy=False)
    kernel = kernel.transpose(numbers.rhs_spec).astype(dtype, copy=False)
    x = _grouped(padded(x, [(0, 0, 0), (0, 0, 0), *_config(params["padding"], params["lhs_dilation"])], 0), params)
    patches = windows(x, kernel.shape[2:], params["window_strides"], params["rhs_dilation"])
    groups, batch, _, *where = patches.shape[: kernel.ndim + 1]
    patches = np.moveaxis(patches, 2, len(where) + 2).reshape(groups, batch * math.prod(where), -1)
    kernel = kernel.reshape(groups, kernel.shape[0] // groups, math.prod(kernel.shape[1:]))
    result = np.matmul(patches, kernel.transpose(0, 2, 1)).reshape(groups, batch, *where, -1)
    result = np.moveaxis(result, (0, -1), (1, 2)).reshape(batch, -1, *where)
    return result.transpose(np.argsort(numbers.out_spec))


def _grouped(x: Array, params: Any) -> Array:
    """`[groups, batch, features, ...]`."""
    batches, parts = params["batch_group_count"], params["feature_group_count"]
    if batches > 1:
        return x.reshape(batches, x.shape[0] // batches, *x.shape[1:])
    return np.moveaxis(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]), 1, 0)


PRODUCTS: dict[str, Kernel] = {"conv_general_dilated": _conv, "dot_general": _dot_general}


# Windows


def _reduce_window(ufunc: np.ufunc, start: Callable[[np.dtype], Any]) -> Kernel:
    def kernel(eqn: compat.JaxprEqn, x: Array) -> Array:
        x = wide(x)
        return _over(ufunc, start, _windows_of(eqn.params, x, start(x.dtype)), range(x.ndim, 2 * x.ndim))

    return kernel


def _over_windows(params: Any, ufunc: np.ufunc, x: Array, start: Any) -> Array:
    """XLA leaves padding out, and starts once per window."""
    seen, inside = _windows_of(params, x, start), _windows_of(params, np.ones(x.shape, bool), False)
    return ufunc.reduce(seen, axis=tuple(range(x.ndim, 2 * x.ndim)), dtype=x.dtype, initial=start, where=inside)


def _windows_of(params: Any, x: Array, fill: Any) -> Array:
    ones = (1,) * x.ndim
    whole = padded(x, _config(params["padding"], params.get("base_dilation", ones)), fill)
    apart = params.get("window_dilation", ones)
    return windows(whole, params["window_dimensions"], params["window_strides"], apart)


FOLDS = {
    "add": np.add,
    "and": np.bitwise_and,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _folded(function: Callable[[Any, np.ufunc, Array, Any], Array]) -> Kernel:
    """With a body of its own: of one equation, or else by jax."""

    def kernel(eqn: compat.JaxprEqn, *operands: Array) -> list[Array]:
        equations = eqn.params["jaxpr"].eqns
        ufunc = FOLDS.get(equations[0].primitive.name) if len(equations) == 1 else None
        if ufunc is None or len(operands) != 2 or not all(map(compat.is_var, equations[0].invars)):
            return by_jax(eqn, operands)
        x, start = map(wide, operands)
        return [function(eqn.params, ufunc, x, start[()])]

    return kernel


def _reduce(params: Any, ufunc: np.ufunc, x: Array, start: Any) -> Array:
    return ufunc.reduce(x, axis=tuple(params["dimensions"]), dtype=x.dtype, initial=start)


def _selected(params: Any, x: Array) -> Array:
    """For every window the place of its first largest (or smallest), in the flat array; -1 is padding."""
    largest = params["select_prim"].name == "ge"
    seen = _windows_of(params, wide(x), (lowest if largest else highest)(wide(x).dtype))
    where = _windows_of(params, np.arange(x.size).reshape(x.shape), -1)
    seen, where = (part.reshape(*part.shape[: x.ndim], -1) for part in (seen, where))
    first = (np.argmax if largest else np.argmin)(seen, -1)
    return np.take_along_axis(where, first[..., None], -1)[..., 0]


def _select_and_scatter_add(eqn: compat.JaxprEqn, source: Array, x: Array) -> Array:
    """The gradient of a pool."""
    given = np.zeros(x.size + 1, wide(x).dtype)
    np.add.at(given, _selected(eqn.params, x).ravel(), wide(source).ravel())
    return given[:-1].reshape(x.shape)


def _select_and_gather_add(eqn: compat.JaxprEqn, tangents: Array, x: Array) -> Array:
    """The tangent of a pool."""
    places = _selected(eqn.params, x)
    return np.where(places < 0, 0, np.take(tangents, places, mode="clip"))


WINDOWS: dict[str, Kernel] = {
    "reduce": _folded(_reduce),
    "reduce_window": _folded(_over_windows),
    "reduce_window_max": _reduce_window(np.maximum, lowest),
    "reduce_window_min": _reduce_window(np.minimum, highest),
    "reduce_window_sum": _reduce_window(np.add, lambda dtype: dtype.type(0)),
    "select_and_gather_add": _select_and_gather_add,
    "select_and_scatter_add": _select_and_scatter_add,
}


# By index


@dataclass(frozen=True)
class Places:
    """Where the windows of a gather or scatter lie in the flat array.

    Attributes:
      flat: `[batch, window]`, inside the array.
      inside: per window, whether it was there before it was moved.
    """

    flat: np.ndarray
    inside: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """`inside` for every element."""
        more = self.flat.ndim - self.inside.ndim
        return np.broadcast_to(self.inside.reshape(self.inside.shape + (1,) * more), self.flat.shape)


def _places(
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: Array,
    mapped: Sequence[int],
    batching: Sequence[tuple[int, int]],
    window: Sequence[int],
) -> Places:
    """The window has the dimensions `window`; `batching` pairs dimensions of the array with those of the indices."""
    indices, batch = indices.astype(np.int64), indices.shape[:-1]
    first, inside = np.zeros(batch, np.int64), np.ones(batch, bool)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for number, dim in enumerate(mapped):
        start, last = indices[..., number], shape[dim] - sizes[dim]
        inside &= (start >= 0) & (start <= last)
        first += np.clip(start, 0, max(last, 0)) * strides[dim]
    for dim, along in batching:
        first += _along(np.arange(batch[along]) * strides[dim], along, len(batch))
    flat = first.reshape(batch + (1,) * len(window))
    for number, dim in enumerate(window):
        flat = flat + _along(np.arange(sizes[dim]) * strides[dim], number, len(window))
    return Places(flat, inside)


def _gather(eqn: compat.JaxprEqn, x: Array, indices: Array) -> Array:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    batching = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [dim for dim in range(x.ndim) if dim not in gone]
    places = _places(x.shape, params["slice_sizes"], indices, numbers.start_index_map, batching, window)
    taken = np.take(x.reshape(-1), places.flat, mode="clip") if x.size else np.zeros(places.flat.shape, x.dtype)
    if params["mode"] == GatherScatterMode.FILL_OR_DROP and not places.inside.all():
        taken = np.where(places.kept, taken, np.array(_filling(params["fill_value"], x.dtype)).astype(x.dtype))
    batch = indices.ndim - 1
    return np.moveaxis(taken, range(batch, taken.ndim), numbers.offset_dims)


def _filling(value: Any, dtype: np.dtype) -> Any:
    if value is not None:
        return value
    if is_kind(dtype, np.inexact):
        return np.nan
    return lowest(dtype) if is_kind(dtype, np.signedinteger) else highest(dtype)


def _scatter(ufunc: np.ufunc | None) -> Kernel:
    def kernel(eqn: compat.JaxprEqn, x: Array, indices: Array, updates: Array) -> Array:
        if ufunc is None and getattr(eqn.params["update_jaxpr"], "eqns", ()):  # `.at[].apply`
            (result,) = by_jax(eqn, [x, indices, updates])
            return result
        places, updates = _targets(eqn, x, indices, updates)
        kept = Ellipsis if places.inside.all() else places.kept
        changed = np.array(wide(x)).reshape(-1)
        where, given = places.flat[kept], wide(updates)[kept]
        if ufunc is None:
            changed[where] = given
        elif where.size:
            ufunc.at(changed, where, given)
        return changed.reshape(x.shape)

    return kernel


def _targets(eqn: compat.JaxprEqn, x: Array, indices: Array, updates: Array) -> tuple[Places, Array]:
    """Where updates go, and the updates with the dimensions of their window last."""
    numbers = eqn.params["dimension_numbers"]
    batching = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window, sizes = [dim for dim in range(x.ndim) if dim not in gone], [1] * x.ndim
    for dim, along in zip(window, numbers.update_window_dims, strict=True):
        sizes[dim] = updates.shape[along]
    batch = [dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims]
    places = _places(x.shape, sizes, indices, numbers.scatter_dims_to_operand_dims, batching, window)
    if eqn.params["mode"] == GatherScatterMode.CLIP:
        places = Places(places.flat, np.ones_like(places.inside))
    return places, updates.transpose(*batch, *numbers.update_window_dims)


INDEXED: dict[str, Kernel] = {
    "gather": _gather,
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter-max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum),
    "scatter-mul": _scatter(np.multiply),
    "scatter-sub": _scatter(np.subtract),
}


# Random numbers: threefry in its partitionable form


def threefry(key1: Array, key2: Array, x1: Array, x2: Array) -> tuple[Array, Array]:
    """The hash of two words, twenty rounds."""
    keys = (key1, key2, key1 ^ key2 ^ np.uint32(0x1BD11BDA))
    x1, x2 = x1 + key1, x2 + key2
    for number in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[number % 2]:
            x1 = x1 + x2
            x2 = (x2 << np.uint32(by)) | (x2 >> np.uint32(32 - by))
            x2 = x1 ^ x2
        x1 = x1 + keys[(number + 1) % 3]
        x2 = x2 + keys[(number + 2) % 3] + np.uint32(number + 1)
    return x1, x2


def _is_drawn_here(eqn: compat.JaxprEqn) -> bool:
    atoms = [atom for atom in (*eqn.invars, *eqn.outvars) if not isinstance(atom.aval.dtype, np.dtype)]
    own = all(atom.aval.dtype.name == "key<fry>" for atom in atoms)
    return eqn.primitive.name in MARKED or (own and bool(jax.config.jax_threefry_partitionable))


def _counts(shape: Sequence[int]) -> tuple[Array, Array]:
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)


def _drawn(keys: Keys, shape: Sequence[int]) -> tuple[Array, Array]:
    """Two words for every key and every element."""
    words = keys.words.reshape(*keys.shape, *[1] * len(shape), 2)
    return threefry(words[..., 0], words[..., 1], *_counts(shape))


def _random_bits(eqn: compat.JaxprEqn, keys: Keys) -> Array:
    high, low = _drawn(keys, eqn.params["shape"])
    if eqn.params["bit_width"] == 64:
        return (np.asarray(high, np.uint64) << np.uint64(32)) | low
    return np.asarray(high ^ low).astype(_dtype(eqn))


def _random_split(eqn: compat.JaxprEqn, keys: Keys) -> Keys:
    return Keys(np.stack(_drawn(keys, eqn.params["shape"]), -1), keys.dtype)


def _random_fold_in(eqn: compat.JaxprEqn, keys: Keys, data: Array) -> Keys:
    zero = np.zeros((), np.uint32)
    words = threefry(keys.words[..., 0], keys.words[..., 1], zero, data.astype(np.uint32))
    return Keys(np.stack(words, -1), keys.dtype)


def _random_seed(eqn: compat.JaxprEqn, seeds: Array) -> Keys:
    high = (seeds.view(np.uint64) >> np.uint64(32)) if seeds.dtype.itemsize == 8 else np.zeros_like(seeds)
    return Keys(np.stack([high.astype(np.uint32), seeds.astype(np.uint32)], -1), _dtype(eqn))


MARKED: dict[str, Kernel] = {
    "iota_2x32_shape": lambda eqn: list(_counts(eqn.params["shape"])),
    "random_clone": lambda eqn, keys: keys,
    "random_unwrap": lambda eqn, keys: keys.words,
    "random_wrap": lambda eqn, words: Keys(words, _dtype(eqn)),
    "threefry2x32": lambda eqn, *words: list(threefry(*words)),
}
RANDOM: dict[str, Kernel] = {
    **MARKED,
    "random_bits": _random_bits,
    "random_fold_in": _random_fold_in,
    "random_seed": _random_seed,
    "random_split": _random_split,
}

KERNELS: dict[str, Kernel] = {**ELEMENTWISE, **ALONG, **MOVED, **PRODUCTS, **WINDOWS, **INDEXED}
