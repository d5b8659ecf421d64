"""Groups of operations that cover every class of kernel.

A group is compiled as one function and timed kernel by kernel. `GROUPS[name]()` is `(function,
arguments)`. Sizes cover what training steps contain: narrow and wide channels, small and large
images, two and three dimensions, arrays from a few KB to a GB.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Group = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class Convolution:
    """A convolution with padding SAME, channels last, which is run with its gradients."""

    batch: int
    sides: tuple[int, ...]
    channels: int
    features: int
    window: int = 3
    stride: int = 1
    groups: int = 1
    dilation: int = 1

    def arguments(self, dtype: str) -> tuple[jax.Array, ...]:
        """Image, kernel, and the cotangent of the result."""
        rank = len(self.sides)
        image = (self.batch, *self.sides, self.channels)
        kernel = (*(self.window,) * rank, self.channels // self.groups, self.features)
        result = (self.batch, *(-(-side // self.stride) for side in self.sides), self.features)
        return tuple(
            _random(number, shape, dtype) for number, shape in enumerate((image, kernel, result))
        )

    def __call__(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        letters = "DHW"[-len(self.sides) :]
        return lax.conv_general_dilated(
            image, kernel, (self.stride,) * len(self.sides), "SAME",
            rhs_dilation=(self.dilation,) * len(self.sides), feature_group_count=self.groups,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        )  # fmt: skip


IMAGES = (
    Convolution(64, (56, 56), 64, 64),
    Convolution(64, (14, 14), 256, 256),
    Convolution(64, (56, 56), 256, 64, window=1),
    Convolution(64, (7, 7), 512, 2048, window=1),
    Convolution(64, (28, 28), 128, 128, stride=2),
    Convolution(64, (224, 224), 3, 64, window=7, stride=2),
    Convolution(4, (512, 512), 32, 32),
    Convolution(4, (512, 512), 16, 16),
    Convolution(16, (64, 64), 256, 256, dilation=2),
    Convolution(64, (28, 28), 128, 128, groups=32),
    Convolution(32, (56, 56), 144, 144, groups=144),
)
VOLUMES = (
    Convolution(1, (128, 128, 128), 32, 32),
    Convolution(1, (128, 128, 128), 96, 32),
    Convolution(1, (64, 64, 64), 64, 64),
    Convolution(1, (32, 32, 32), 128, 128),
    Convolution(1, (16, 16, 16), 256, 256),
    Convolution(1, (128, 128, 128), 4, 16),
    Convolution(2, (96, 96, 96), 32, 64, stride=2),
    Convolution(1, (128, 128, 128), 32, 4, window=1),
)
PRODUCTS = (  # Batch, rows, columns, contracted.
    (1, 4096, 4096, 4096),
    (1, 1024, 1024, 1024),
    (1, 8192, 1024, 1024),
    (1, 8192, 4096, 1024),
    (1, 8192, 32768, 1024),
    (1, 1024, 1024, 8192),
    (1, 8192, 64, 4096),
    (1, 65536, 64, 64),
    (1, 256, 256, 65536),
    (128, 1024, 1024, 64),
    (128, 1024, 64, 1024),
    (64, 256, 256, 128),
)


def placed(group: Group) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A group's function, and its arguments as arrays that one compiled function creates."""
    functions: list[Callable[..., Any]] = []

    def make() -> Sequence[Any]:
        function, args = group()
        functions.append(function)
        return args

    args = jax.block_until_ready(jax.jit(make)())
    return functions[0], args


def convolutions(
    layers: Sequence[Convolution], dtype: str
) -> tuple[Callable[..., Any], Sequence[Any]]:
    def function(arguments: Sequence[Any]) -> Any:
        results = []
        for layer, (image, kernel, gradient) in zip(layers, arguments, strict=True):
            result, pullback = jax.vjp(layer, image, kernel)
            results.append((result, *pullback(gradient)))
        return results

    return function, ([layer.arguments(dtype) for layer in layers],)


def products(dtype: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    def function(pairs: Sequence[Any]) -> Any:
        return [jnp.einsum("bmk,bkn->bmn", lhs, rhs) for lhs, rhs in pairs]

    pairs = [
        (
            _random(0, (batch, rows, contracted), dtype),
            _random(1, (batch, contracted, columns), dtype),
        )
        for batch, rows, columns, contracted in PRODUCTS
    ]
    return function, (pairs,)


def bandwidth(dtype: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Elementwise kernels from 4 KB to 1 GB, some that only read and some that only write."""
    sizes = [4**power for power in range(5, 15)]

    def function(arrays: Sequence[jax.Array], scale: jax.Array) -> Any:
        scaled = [array * scale + jnp.asarray(1, dtype) for array in arrays]
        written = [jnp.broadcast_to(scale * size, (size // 7 + 1, 7)) for size in sizes]
        return scaled, [array.sum() for array in arrays], written

    return function, ([_random(0, (size,), dtype) for size in sizes], jnp.asarray(2, dtype))


def reductions(dtype: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Sums of rows, columns and channels; softmax; norms with their gradients."""

    def normalized(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5)

    def function(rows: jax.Array, scores: jax.Array, images: jax.Array, volume: jax.Array) -> Any:
        norms = [
            (normalized, rows, (1,)),
            (normalized, images, (0, 1, 2)),
            (normalized, volume, (1, 2, 3)),
        ]
        results: list[Any] = [
            rows.sum(0),
            rows.sum(1),
            images.sum((0, 1, 2)),
            scores.max(-1),
            jax.nn.softmax(scores),
        ]
        for norm, array, axes in norms:
            result, pullback = jax.vjp(partial(norm, axes=axes), array)
            results += [result, *pullback(jnp.cos(array))]
        result, pullback = jax.vjp(jax.nn.softmax, scores)
        return [*results, *pullback(jnp.cos(scores))]

    shapes = (8192, 4096), (128, 1024, 1024), (64, 56, 56, 256), (1, 128, 128, 128, 32)
    return function, [_random(number, shape, dtype) for number, shape in enumerate(shapes)]


def movements(dtype: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Transposes, gathers, scatters, pooling, windows, padding, sums along an axis, sorting."""

    def function(
        rows: jax.Array, images: jax.Array, volume: jax.Array, table: jax.Array, index: jax.Array
    ) -> Any:
        pool = partial(
            lax.reduce_window, init_value=-jnp.inf, computation=lax.max,
            window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 2, 1), padding="SAME",
        )  # fmt: skip
        pooled, pullback = jax.vjp(lambda x: pool(x.astype("float32")), images)
        looked_up, scatter = jax.vjp(lambda x: x[index], table)
        padded = jnp.pad(volume, ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
        doubled = jnp.concatenate([volume, jnp.cos(volume), volume * 2], -1)
        updated = lax.dynamic_update_slice(
            volume, jnp.sin(volume[:, :8]), (0, index[0] % 64, 0, 0, 0)
        )
        up = jnp.repeat(jnp.repeat(volume[:, :64, :64], 2, 1), 2, 2)
        return (
            rows.T.copy(), jnp.moveaxis(images, -1, 1).copy(), jnp.moveaxis(volume, -1, 1).copy(),
            pooled, pullback(jnp.cos(pooled)), looked_up, scatter(jnp.cos(looked_up)), padded,
            doubled, updated, up,
            jnp.cumsum(rows, 1), jnp.sort(rows[:1024], 1), lax.top_k(rows[:1024], 8),
            jnp.flip(volume, 2),
            jax.random.normal(jax.random.key(index[0]), (2048, 4096), "float32"),
            jax.random.bernoulli(jax.random.key(index[1]), 0.9, (8192, 4096)),
        )  # fmt: skip

    shapes = (8192, 4096), (64, 112, 112, 64), (1, 128, 128, 128, 32), (32768, 1024)
    arrays = [_random(number, shape, dtype) for number, shape in enumerate(shapes)]
    return function, [*arrays, jax.random.randint(jax.random.key(9), (8192,), 0, 32768)]


def library() -> tuple[Callable[..., Any], Sequence[Any]]:
    """Decompositions and transforms by libraries, at three sizes."""

    def function(squares: Sequence[jax.Array]) -> Any:
        results: list[Any] = []
        for square in squares:
            symmetric = square @ square.mT / square.shape[-1] + 2 * jnp.eye(square.shape[-1])
            factor = jnp.linalg.cholesky(symmetric)
            solved = lax.linalg.triangular_solve(factor, square, left_side=True, lower=True)
            results += [
                factor,
                solved,
                jnp.linalg.eigh(symmetric),
                jnp.linalg.qr(square),
                jnp.fft.rfft2(square),
            ]
        return results, lax.linalg.svd(squares[1]), lax.linalg.lu(squares[1])

    shapes = (1, 256, 256), (1, 1024, 1024), (64, 128, 128)
    return function, ([_random(number, shape, "float32") for number, shape in enumerate(shapes)],)


def launches(count: int = 400) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A chain of small products, for the cost of a launch."""

    def function(square: jax.Array) -> jax.Array:
        for _ in range(count):
            square = jnp.tanh(square @ square)
        return square

    return function, (_random(0, (256, 256), "float32"),)


def trips(count: int = 200) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The same chain in a loop with a trip count that XLA knows, and in one without."""

    def body(square: jax.Array) -> jax.Array:
        return jnp.tanh(square @ square)

    def function(square: jax.Array, limit: jax.Array) -> Any:
        counted = lax.fori_loop(0, count, lambda _, carry: body(carry), square)
        return counted, lax.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, body(c[1])), (0, square)
        )

    return function, (_random(0, (256, 256), "float32"), jnp.int32(count))


def arguments(count: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Many small arguments and results, for the cost of an argument on the host."""

    def function(arrays: Sequence[jax.Array]) -> Any:
        return [array + 1 for array in arrays]

    return function, ([jnp.full((8, number % 7 + 1), 1.0) for number in range(count)],)


def _random(number: int, shape: Sequence[int], dtype: str) -> jax.Array:
    """Random numbers: zeros and ones draw less power, so some chips would clock higher."""
    return jax.random.uniform(jax.random.key(number), shape, jnp.dtype(dtype), -1, 1)


GROUPS: Mapping[str, Group] = {
    **{
        f"images, {dtype}": partial(convolutions, IMAGES, dtype)
        for dtype in ("float32", "bfloat16")
    },
    **{
        f"volumes, {dtype}": partial(convolutions, VOLUMES, dtype)
        for dtype in ("float32", "bfloat16")
    },
    **{f"products, {dtype}": partial(products, dtype) for dtype in ("float32", "bfloat16")},
    **{f"bandwidth, {dtype}": partial(bandwidth, dtype) for dtype in ("float32", "bfloat16")},
    **{f"reductions, {dtype}": partial(reductions, dtype) for dtype in ("float32", "bfloat16")},
    **{f"movements, {dtype}": partial(movements, dtype) for dtype in ("float32", "bfloat16")},
    "library": library,
    "launches": launches,
    "trips": trips,
    **{f"arguments, {count}": partial(arguments, count) for count in (10, 100, 400, 1000)},
}
