"""An operation for every primitive whose rows a rule knows, of an array of whatever shape.

The exact ones make small whole numbers of small whole numbers, so that every sum is exact in whatever order.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.program import compat

WORDS = 10
Array = Any


class Dice:
    """Choices by number; past their end the first of every choice."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers, self.at = numbers, 0

    def below(self, count: int) -> int:
        self.at += 1
        return self.numbers[self.at - 1] % count if self.at <= len(self.numbers) else 0

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]


Op = Callable[[Dice, Array], Any]


def unary(function: Callable[[Array], Array]) -> Op:
    return lambda dice, x: function(x)


def ints(x: Array) -> Array:
    return jnp.clip(jnp.round(x), -3, 3).astype(jnp.int32)


def dim(dice: Dice, x: Array) -> int:
    """Of several dimensions the first, which is most often the batch, less often than another."""
    if x.ndim < 2 or not dice.below(5):
        return 0
    return 1 + dice.below(x.ndim - 1)


def partner(dice: Dice, x: Array) -> Array:
    """Something that x can be computed with, of the same rank or a scalar."""
    at = dim(dice, x)
    partners = [
        lambda: jnp.flip(x, at) if x.ndim else x,
        lambda: x * 2,
        lambda: x.sum(at, keepdims=True) if x.ndim else x,
        lambda: (
            jnp.broadcast_to(
                lax.broadcasted_iota(jnp.float32, x.shape, at) if x.ndim else 1.0, x.shape
            )
            - 1
        ),
        lambda: jnp.float32(2),
        lambda: x.max() if x.size else x,
    ]
    return dice.of(partners)().astype(x.dtype)


def binary(function: Callable[[Array, Array], Array]) -> Op:
    def op(dice: Dice, x: Array) -> Array:
        y = partner(dice, x)
        return (
            function(*jnp.broadcast_arrays(x, y)) if dice.below(2) else function(*_same_rank(x, y))
        )

    return op


def _same_rank(x: Array, y: Array) -> tuple[Array, Array]:
    return x, jnp.broadcast_to(y, x.shape) if y.shape != x.shape else y


def on_ints(function: Callable[..., Array]) -> Op:
    """Of whole numbers, and back to floats."""
    return lambda dice, x: function(ints(x), ints(partner(dice, x))).astype(jnp.float32)


def compared(function: Callable[[Array, Array], Array]) -> Op:
    return lambda dice, x: jnp.where(function(x, partner(dice, x)), x, -x)


def unequal(op: Op) -> Op:
    """Without its gradient, which shares among equals by division, or does not exist."""
    return lambda dice, x: op(dice, lax.stop_gradient(x)) + 0 * x.sum()


def reduced(function: Callable[..., Array]) -> Op:
    def op(dice: Dice, x: Array) -> Array:
        axes = tuple(sorted({dim(dice, x) for _ in range(1 + dice.below(2))})) if x.ndim else ()
        return function(x, axis=axes, keepdims=bool(dice.below(2)))

    return op


def at_dim(function: Callable[[Dice, Array, int], Array]) -> Op:
    """At one dimension, of which there has to be one."""
    return lambda dice, x: function(dice, x, dim(dice, x)) if x.ndim else x


def along(function: Callable[[Array, int], Array]) -> Op:
    return at_dim(lambda dice, x, at: function(x, at))


def truths(function: Callable[..., Array]) -> Op:
    return lambda dice, x: reduced(function)(dice, x > 0).astype(jnp.float32) + x.sum()


def dot(dice: Dice, x: Array) -> Array:
    """With itself along any dimension, contracted or batched, or with a weight of its own making."""
    if not x.ndim:
        return x * x
    at, variant = dim(dice, x), dice.below(4)
    if variant == 0:
        if x.ndim > 2:
            return jnp.tensordot(x, x.sum(0), 0).sum(0)
        return lax.dot_general(x, x, (((at,), (at,)), ((), ())))
    if variant == 1 and x.ndim >= 2:
        batch_dim = (at + 1) % x.ndim
        return lax.dot_general(x, x, (((at,), (at,)), ((batch_dim,), (batch_dim,))))
    size = x.shape[at]
    weight = (lax.iota(jnp.int32, size * 3) % 3 - 1).reshape(size, 3).astype(x.dtype)
    kind = jnp.float32 if variant == 2 else None
    return lax.dot_general(x, weight, (((at,), (0,)), ((), ())), preferred_element_type=kind)


def images(x: Array) -> Array:
    """Rank four, the largest dimension first."""
    x = x.reshape(-1) if x.ndim < 2 else x
    at = int(np.argmax(x.shape))
    x = jnp.moveaxis(x, at, 0).reshape(x.shape[at], -1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)))
    return x[:, :8].reshape(-1, 2, 2, 2)


def convolution(dice: Dice, x: Array) -> Array:
    """Batch in any position, stride, padding, groups, dilation."""
    x, groups = images(x), dice.of((1, 1, 2))
    specs = dice.of(LAYOUTS)
    x = jnp.transpose(x, ["NHWC".index(letter) for letter in specs[0]])
    sizes = {"O": 2 * dice.of((1, 3)), "I": 2 // groups, "H": 2, "W": 2}
    shape = [sizes[letter] for letter in specs[1]]
    weight = (lax.iota(jnp.int32, int(np.prod(shape))) % 3 - 1).reshape(shape).astype(x.dtype)
    weight = weight * (1 + 0 * x.ravel()[0])  # so that it has a gradient
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=dice.of(((1, 1), (2, 1))),
        padding=dice.of((((1, 1), (1, 1)), ((0, 2), (2, 1)))),
        lhs_dilation=dice.of(((1, 1), (2, 1))),
        rhs_dilation=dice.of(((1, 1), (1, 2))),
        dimension_numbers=specs,
        feature_group_count=groups,
    )


LAYOUTS = (
    ("NHWC", "HWIO", "NHWC"),
    ("NCHW", "OIHW", "NCHW"),
    ("HWNC", "HWIO", "HWNC"),
    ("CHWN", "IHWO", "NCHW"),
)


def pooled(function: Callable[..., Array], start: float) -> Op:
    def op(dice: Dice, x: Array) -> Array:
        x = images(x)
        window = dice.of(((1, 2, 2, 1), (1, 2, 1, 1), (1, 1, 2, 2), (2, 1, 1, 1)))
        strides = dice.of((window, (1, 1, 1, 1)))
        padding = dice.of(("SAME", "VALID")) if len(x) > 1 else "SAME"
        return lax.reduce_window(x, np.float32(start), function, window, strides, padding)

    return op


def odd_window(dice: Dice, x: Array) -> Array:
    """No sum, no maximum: jax writes it with a body of its own."""
    window = dice.of(((1, 2, 2, 1), (1, 1, 1, 2)))
    x, ones = ints(images(x)), (1, 1, 1, 1)
    parity = lax.reduce_window(x, np.int32(0), lambda a, b: a ^ b, window, ones, "SAME")
    return parity.astype(jnp.float32)


def tangent_of_pool(dice: Dice, x: Array) -> Array:
    pool, at = pooled(lax.max, -np.inf), dice.at

    def again(x: Array) -> Array:
        dice.at = at
        return pool(dice, x)

    return jax.jvp(again, (lax.stop_gradient(x),), (lax.stop_gradient(x * 2),))[1]


def gradient_of_pool(dice: Dice, x: Array) -> Array:
    pool, at = pooled(lax.max, -np.inf), dice.at

    def total(x: Array) -> Array:
        dice.at = at
        return (2 * pool(dice, x)).sum()

    return jax.grad(total)(lax.stop_gradient(x)) + x


@at_dim
def taken(dice: Dice, x: Array, at: int) -> Array:
    """Rows by index, one of each row, a column; out of bounds at times."""
    variant = dice.below(4)
    size = x.shape[at]
    if variant == 0:
        return jnp.take(x, dice.below(size), axis=at)
    if variant == 1:
        return jnp.take(
            x, jnp.arange(size) * 2 % (size + 1), axis=at, mode=dice.of(("clip", "wrap"))
        )
    if variant == 2:
        where = jnp.argmax(x, axis=at, keepdims=True)
        return jnp.take_along_axis(x, where, axis=at)
    rows = ints(x).ravel()[: max(1, x.size)] % size
    return jnp.take(
        x, rows if x.ndim == 1 else ints(x.sum(tuple(range(1, x.ndim)))) % size, axis=at
    )


@at_dim
def dynamic_slice(dice: Dice, x: Array, at: int) -> Array:
    return lax.dynamic_slice_in_dim(x, ints(x).sum() % 3, max(1, x.shape[at] // 2), at)


@at_dim
def dynamic_update(dice: Dice, x: Array, at: int) -> Array:
    part = 2 * lax.slice_in_dim(x, 0, max(1, x.shape[at] // 2), axis=at)
    return lax.dynamic_update_slice_in_dim(x, part, ints(x).sum() % 3, at)


def scattered(how: str) -> Op:
    """Into a table, rows of it, or single places of every row."""

    def op(dice: Dice, x: Array) -> Array:
        if not x.ndim:
            return x
        rows = ints(x.sum(tuple(range(1, x.ndim)))) % WORDS
        variant = dice.below(3)
        if variant == 0:
            return getattr(jnp.ones((WORDS, *x.shape[1:])).at[rows], how)(x)
        if variant == 1 and x.ndim >= 2:
            column = ints(x.sum(tuple(range(1, x.ndim)))) % x.shape[1]
            place = jnp.expand_dims(column, tuple(range(1, x.ndim)))
            if how != "set":
                return jax.vmap(lambda row, c: getattr(row.at[c], how)(2.0))(x, column)
            return jnp.put_along_axis(x, place, 2.0, 1, inplace=False, mode="clip")
        return getattr(jnp.moveaxis(x, dim(dice, x), 0).at[dice.below(2)], how)(2.0)

    return op


def subtracted(dice: Dice, x: Array) -> Array:
    """Rows from rows, by index."""
    if not x.ndim or not hasattr(lax, "scatter_sub"):
        return x
    rows = ints(x.reshape(x.shape[0], -1).sum(1)) % x.shape[0]
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, x.ndim)), (0,), (0,))
    once = lax.scatter_sub(x, rows[:, None], x, numbers)
    return lax.scatter_sub(once, rows[:, None], 2 * x, numbers)


def reshaped(dice: Dice, x: Array) -> Array:
    if x.ndim >= 2 and dice.below(2):
        at = dice.below(x.ndim - 1)
        return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
    parts = [
        (at, factor)
        for at, size in enumerate(x.shape)
        for factor in (2, 3, size)
        if size % factor == 0
    ]
    if not parts:
        return x.reshape(1)
    at, factor = dice.of(parts)
    sizes = (factor, x.shape[at] // factor) if dice.below(2) else (x.shape[at] // factor, factor)
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def transposed(dice: Dice, x: Array) -> Array:
    order = sorted(range(x.ndim), key=lambda _: dice.below(7))
    return jnp.transpose(x, order)


def broadcast(dice: Dice, x: Array) -> Array:
    at = dice.below(x.ndim + 1)
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], dice.of((2, 3)), *x.shape[at:]))


@at_dim
def sliced(dice: Dice, x: Array, at: int) -> Array:
    size = x.shape[at]
    span = dice.of(((0, -(-size // 2), 1), (size // 3, None, 1), (0, None, 2)))
    return lax.slice_in_dim(x, *span, axis=at)


def joined(x: Array, at: int) -> Array:
    return jnp.concatenate([x, 2 * x], at)


def split(dice: Dice, x: Array) -> Array:
    if not x.ndim or x.shape[at := dim(dice, x)] < 2:
        return x
    size = x.shape[at]
    first, second = lax.split(x, dice.of(((size // 2, size - size // 2), (1, size - 1))), at)
    return jnp.concatenate([second, first], at) if dice.below(2) else first.sum() + second


@at_dim
def sorted_by(dice: Dice, x: Array, at: int) -> Array:
    keys, values = lax.sort((x, jnp.flip(x, at)), dimension=at, num_keys=1)
    return keys + 2 * values


@at_dim
def largest(dice: Dice, x: Array, at: int) -> Array:
    moved = jnp.moveaxis(x, at, -1)
    values, places = lax.top_k(moved, 1 + dice.below(min(2, x.shape[at])))
    return values + places


def chosen(dice: Dice, x: Array) -> Array:
    return lax.select_n(ints(x) > dice.below(2), x, -2 * x)


def unstacked(x: Array, at: int) -> Array:
    return functools.reduce(operator.sub, jnp.unstack(x, axis=at))


@at_dim
def windowed_pad(dice: Dice, x: Array, at: int) -> Array:
    config = dice.of(((1, 2, 0), (0, 0, 1), (-1, 1, 0), (0, 0, 0)))
    fill = np.float32(dice.below(2)).astype(x.dtype)
    return lax.pad(x, fill, [config if i == at else (0, 0, 0) for i in range(x.ndim)])


def typed(kind: Any) -> Op:
    return lambda dice, x: (jnp.clip(x, -3, 3).astype(kind) * 2).astype(jnp.float32)


def complexes(dice: Dice, x: Array) -> Array:
    z = lax.complex(x, 2 * x)
    return dice.of((jnp.real, jnp.imag))(lax.conj(z) * z + z)


def keys_of(dice: Dice, x: Array, seed: int = 3) -> tuple[Array, Array]:
    """One key, or one for each example, of either kind; and what they are for."""
    key = dice.of((jax.random.key, jax.random.PRNGKey))(seed)
    key = jax.random.fold_in(key, dice.below(5))
    return key, x


def drawn(how: Callable[[Array, tuple[int, ...]], Array], *variants: int) -> Op:
    """From one key for all, or from a key of each example."""

    def op(dice: Dice, x: Array) -> Array:
        key, x = keys_of(dice, x)
        variant = dice.of(variants or range(5))
        if not x.ndim or variant == 0:
            return x + how(key, x.shape)
        if variant == 1:
            return x + how(jax.random.split(key)[dice.below(2)], x.shape)
        keys = jax.random.split(key, x.shape[0])
        if variant == 2:
            keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(x.shape[0]))
        if variant == 3:
            keys = jax.vmap(jax.random.split)(keys)[:, 1]
        return jax.vmap(lambda key, row: row + how(key, row.shape))(keys, x)

    return op


def whole_draw(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.randint(key, shape, -2, 3).astype(jnp.float32)


def permuted(key: Array, shape: tuple[int, ...]) -> Array:
    size = shape[0] if shape else 1
    return (
        jax.random.permutation(key, size)
        .reshape(size, *(1,) * (len(shape) - 1))
        .astype(jnp.float32)
        % 3
    )


def coins(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.bernoulli(key, 0.5, shape).astype(jnp.float32)


def cloned(key: Array, shape: tuple[int, ...]) -> Array:
    typed = (
        jax.random.wrap_key_data(key) if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    )
    return whole_draw(jax.random.clone(typed), shape)


def wrapped(key: Array, shape: tuple[int, ...]) -> Array:
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return whole_draw(jax.random.wrap_key_data(words ^ 1), shape)


def seeded(dice: Dice, x: Array) -> Array:
    """A key of each example, from a number of it."""
    if not x.ndim:
        return x
    numbers = ints(x.reshape(x.shape[0], -1)[:, 0])
    return jax.vmap(lambda n, row: row + whole_draw(jax.random.key(n), row.shape))(numbers, x)


def empty(dice: Dice, x: Array) -> Array:
    """What is read of it is never what it holds."""
    return lax.select(x == x, 2 * x, lax.empty(x.shape, x.dtype))


def counted(dice: Dice, x: Array) -> Array:
    return x + (lax.broadcasted_iota(jnp.float32, x.shape, dim(dice, x)) % 3 if x.ndim else 1)


def mapped(dice: Dice, x: Array) -> Array:
    """Along the batch one at a time, layers, microbatches, a loop to the end, a branch."""
    variant = dice.below(5)
    if variant == 0 or not x.ndim:
        return lax.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x - 1, x)
    if variant == 1:
        return lax.map(lambda row: row * 2 + row.sum(), x)
    if variant == 2:
        return (
            lax.scan(lambda c, s: (c + s * s, c.sum()), jnp.zeros_like(x), jnp.arange(1.0, 3.0))[0]
            + x
        )
    if variant == 3 and x.shape[0] % 2 == 0:
        halves = jnp.moveaxis(x.reshape(x.shape[0] // 2, 2, *x.shape[1:]), 1, 0)
        total, each = lax.scan(
            lambda c, h: (c + h.sum(0), h * c), jnp.zeros(x.shape[1:], x.dtype), halves
        )
        return each + total
    return lax.fori_loop(0, 2, lambda i, c: jnp.clip(c * 2 - c.sum(), -3, 3), lax.stop_gradient(x))


ONE = Mesh(np.array(jax.devices()[:1]), ("device",))

kept = lax.stop_gradient  # where jax knows no gradient, or takes seconds to compile it

ELEMENTWISE: dict[str, Op] = {
    "add": binary(operator.add),
    "sub": binary(operator.sub),
    "mul": binary(operator.mul),
    "neg": unary(operator.neg),
    "square": unary(jnp.square),
    "integer_pow": unary(lambda x: lax.integer_pow(x, 3)),
    "copy": unary(jnp.copy),
    "layout_constraint": unary(compat.in_order),
    "name": unary(lambda x: checkpoint_name(x, "kept")),
    "sharding_constraint": unary(
        lambda x: lax.with_sharding_constraint(x, NamedSharding(ONE, PartitionSpec()))
    ),
    "stop_gradient": unary(lambda x: lax.stop_gradient(x) * x),
    "add_any": unary(lambda x: x * x + x),
    "convert_element_type": typed(jnp.float16),
    "device_put": unary(lambda x: jax.device_put(x)),
    "select_n": chosen,
}
ELEMENTWISE_EXACT: dict[str, Op] = {
    "abs": unary(jnp.abs),
    "and": on_ints(lax.bitwise_and),
    "or": on_ints(lax.bitwise_or),
    "xor": on_ints(lax.bitwise_xor),
    "not": on_ints(lambda a, b: lax.bitwise_not(a)),
    "shift_left": on_ints(lambda a, b: a << (b & 1)),
    "shift_right_arithmetic": on_ints(lambda a, b: a >> (b & 1)),
    "shift_right_logical": on_ints(lambda a, b: lax.shift_right_logical(a, b & 3) & 7),
    "clz": on_ints(lambda a, b: lax.clz(a)),
    "population_count": on_ints(lambda a, b: lax.population_count(a)),
    "rem": on_ints(lambda a, b: lax.rem(a, jnp.abs(b) + 1)),
    "bitcast_convert_type": on_ints(lambda a, b: lax.bitcast_convert_type(a, jnp.uint32) & 3),
    "ceil": unary(lambda x: jnp.ceil(x / 2)),
    "floor": unary(lambda x: jnp.floor(x / 2)),
    "round": unary(lambda x: jnp.round(x / 4)),
    "sign": unary(jnp.sign),
    "clamp": lambda dice, x: lax.clamp(jnp.float32(-1), x, dice.of((x + 1, jnp.float32(2)))),
    "max": binary(jnp.maximum),
    "min": binary(jnp.minimum),
    "eq": compared(lax.eq),
    "ne": compared(lax.ne),
    "ge": compared(lax.ge),
    "gt": compared(lax.gt),
    "le": compared(lax.le),
    "lt": compared(lax.lt),
    "is_finite": unary(lambda x: jnp.where(lax.is_finite(x), x, 0.0)),
    "nextafter": unequal(unary(lambda x: jnp.round(lax.nextafter(x, 2 * x)))),
    "reduce_precision": unary(lambda x: lax.reduce_precision(x, 8, 7)),
    "imag": complexes,
    "real": complexes,
    "complex": complexes,
    "conj": complexes,
    "half": typed(jnp.bfloat16),
    "bytes": typed(jnp.int8),
}
ELEMENTWISE_SMOOTH: dict[str, Op] = {
    "acos": unary(lambda x: lax.acos(x / 8)),
    "acosh": unary(lambda x: lax.acosh(x * x + 2)),
    "asin": unary(lambda x: lax.asin(x / 8)),
    "asinh": unary(lax.asinh),
    "atan": unary(lax.atan),
    "atan2": binary(lambda x, y: lax.atan2(x, y * y + 1)),
    "atanh": unary(lambda x: lax.atanh(x / 8)),
    "cbrt": unary(lambda x: lax.cbrt(x * x + 1)),
    "cos": unary(lax.cos),
    "cosh": unary(lax.cosh),
    "digamma": unary(lambda x: lax.digamma(x * x + 1)),
    "div": binary(lambda x, y: x / (y * y + 1)),
    "erf": unary(lax.erf),
    "erf_inv": unary(lambda x: lax.erf_inv(x / 8)),
    "erfc": unary(lax.erfc),
    "exp": unary(lax.exp),
    "exp2": unary(lax.exp2),
    "expm1": unary(lax.expm1),
    "igamma": binary(lambda x, y: special.gammainc(kept(x * x) + 1, kept(y * y) + 1) * x),
    "igammac": binary(lambda x, y: special.gammaincc(kept(x * x) + 1, kept(y * y) + 1) * x),
    "lgamma": unary(lambda x: lax.lgamma(x * x + 1)),
    "log": unary(lambda x: lax.log(x * x + 1)),
    "log1p": unary(lambda x: lax.log1p(x * x)),
    "log2": unary(lambda x: jnp.log2(x * x + 1)),
    "logistic": unary(lax.logistic),
    "polygamma": unary(lambda x: special.polygamma(1, kept(x * x) + 1) * x),
    "pow": binary(lambda x, y: lax.pow(x * x + 1, y / 2)),
    "rsqrt": unary(lambda x: lax.rsqrt(x * x + 1)),
    "sin": unary(lax.sin),
    "sinh": unary(lax.sinh),
    "sqrt": unary(lambda x: lax.sqrt(x * x + 1)),
    "tan": unary(lambda x: lax.tan(x / 4)),
    "tanh": unary(lax.tanh),
    "zeta": unary(
        lambda x: (special.zeta(kept(x * x) + 2, 1.0) + special.zeta(kept(x * x) + 3, 1.0)) * x
    ),
}
if hasattr(lax, "one_minus_square"):
    ELEMENTWISE_SMOOTH["one_minus_square"] = unary(lax.one_minus_square)
SHAPED: dict[str, Op] = {
    "reduce_sum": reduced(jnp.sum),
    "transpose": transposed,
    "broadcast_in_dim": broadcast,
    "squeeze": lambda dice, x: jnp.squeeze(
        jnp.expand_dims(x, at := dice.below(x.ndim + 1)) * 2, at
    ),
    "reshape": reshaped,
    "dot_general": dot,
    "conv_general_dilated": convolution,
    "concatenate": along(joined),
    "split": split,
    "cumsum": lambda dice, x: (
        lax.cumsum(x, dim(dice, x), reverse=bool(dice.below(2))) if x.ndim else x
    ),
    "rev": along(jnp.flip),
    "stack": lambda dice, x: jnp.stack([x, 2 * x], dice.below(x.ndim + 1)),
    "unstack": along(unstacked),
    "tile": lambda dice, x: jnp.tile(x, [dice.of((1, 2)) for _ in range(x.ndim)]),
    "pad": windowed_pad,
    "slice": sliced,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update,
    "reduce_window_sum": pooled(lax.add, 0.0),
    "iota": counted,
    "empty": empty,
    "control": mapped,
}
SHAPED_EXACT: dict[str, Op] = {
    "whole division": on_ints(lambda a, b: lax.div(a.sum(0) if a.ndim else a, 2) + b),
    "reduce_max": unequal(reduced(jnp.max)),
    "reduce_min": unequal(reduced(jnp.min)),
    "reduce_or": truths(jnp.any),
    "reduce_and": truths(jnp.all),
    "argmax": along(lambda x, at: jnp.argmax(x, at).astype(jnp.float32) + x.sum(at)),
    "argmin": along(lambda x, at: jnp.argmin(x, at, keepdims=True) - x),
    "cummax": unequal(along(lax.cummax)),
    "cummin": unequal(along(lax.cummin)),
    "cumprod": unequal(along(lambda x, at: lax.cumprod(jnp.sign(x), at))),
    "sort": sorted_by,
    "top_k": largest,
    "gather": taken,
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-max": unequal(scattered("max")),
    "scatter-min": unequal(scattered("min")),
    "scatter-mul": unequal(scattered("multiply")),
    "scatter-sub": unequal(subtracted),
    "reduce_window_max": pooled(lax.max, -np.inf),
    "reduce_window_min": pooled(lax.min, np.inf),
    "reduce_window": odd_window,
    "select_and_scatter_add": gradient_of_pool,
    "select_and_gather_add": tangent_of_pool,
    "random_bits": drawn(whole_draw),
    "random_split": drawn(coins, 3),
    "random_fold_in": drawn(permuted, 2),
    "random_clone": drawn(cloned, 2, 4),
    "random_wrap": drawn(wrapped, 2, 3, 4),
    "random_unwrap": drawn(wrapped, 2, 3, 4),
    "random_seed": seeded,
}
SHAPED_SMOOTH: dict[str, Op] = {
    "cumlogsumexp": unequal(along(lax.cumlogsumexp)),
    "normalised": along(
        lambda x, at: (x - x.mean(at, keepdims=True)) * lax.rsqrt(x.var(at, keepdims=True) + 0.1)
    ),
    "softmax": along(jax.nn.softmax),
    "normal": drawn(jax.random.normal),
}
