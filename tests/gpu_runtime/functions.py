"""Small functions whose results on the stand-in are compared with jax's on CPU, in one process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DRAWN = np.random.default_rng(0)
ARRAYS = {
    "a": _DRAWN.standard_normal((100, 130)).astype(np.float32),
    "b": _DRAWN.standard_normal((130, 70)).astype(np.float32),
    "x": _DRAWN.standard_normal((2, 12, 12, 8)).astype(np.float32),
    "w": _DRAWN.standard_normal((3, 3, 8, 16)).astype(np.float32),
}
Function = Callable[..., Any]


def _conv(x: Any, w: Any, stride: int = 1, **more: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, **more
    )


def _conv3d(x: Any, w: Any) -> Any:
    x, w = x.reshape(2, 6, 6, 4, 8), w.reshape(1, 3, 3, 8, 16)
    numbers = ("NDHWC", "DHWIO", "NDHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=numbers)


def _pool(x: Any, start: Any, operation: Any, window: int, padding: str) -> Any:
    return jax.lax.reduce_window(x, start, operation, (1, window, window, 1), (1, 2, 2, 1), padding)


def _gradients(f: Function) -> Function:
    @functools.wraps(f)
    def gradients(*args: Any) -> Any:
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), tuple(range(len(args))))(*args)

    return gradients


def _half(f: Function, dtype: Any) -> Function:
    @functools.wraps(f)
    def half(*args: Any) -> Any:
        return jax.tree.map(
            lambda y: y.astype(jnp.float32), f(*(arg.astype(dtype) for arg in args))
        )

    return half


# By tolerance, relative to the largest element: one rounding or none, sums in another order, half precision.
ELEMENTS: dict[str, Function] = {
    "arithmetic": lambda a: (
        a + 1,
        a * a - a / 3,
        jnp.floor(a),
        jnp.round(a),
        jnp.sign(a),
        a % 0.3,
        jnp.abs(a),
    ),
    "integers": lambda a: (
        (a * 100).astype(jnp.int32) // 7,
        (a * 100).astype(jnp.int32) % 7,
        (jnp.abs(a) * 100).astype(jnp.uint8),
        (a * 50).astype(jnp.int8) >> 1,
        jax.lax.population_count((a * 1000).astype(jnp.int32)),
    ),
    "max min": lambda a: (a.max(1), a.min(0), a.max(), a.argmax(1)),
    "transpose": lambda a: (a.T * 2, a.reshape(10, 10, 130).transpose(2, 0, 1) * 2),
    "slices": lambda x: (
        jnp.pad(x, ((0, 0), (1, 2), (0, 0), (0, 0))),
        jax.lax.dynamic_update_slice(x, x[:1, :3] * 2, (1, 4, 0, 0)),
        x[:, ::2, ::-1],
    ),
    "gather": lambda a: a[jnp.arange(50) * 2 % 100],
    "sort": lambda a: (jnp.sort(a, 1), jnp.argsort(a, 0), jax.lax.top_k(a, 5)),
    "cond": lambda a: jax.lax.cond(a.sum() > 0, lambda a: a * 2, lambda a: a - 1, a),
    "random bits": lambda a: (
        jax.random.randint(jax.random.key(3), (1000,), 0, 77) + a[0, 0].astype(jnp.int32),
        jax.random.permutation(jax.random.key(1), 100),
    ),
}
SUMS: dict[str, Function] = {
    "transcendental": lambda a: (
        jnp.sin(a) + jnp.exp(a) * jnp.tanh(a) + jnp.log(jnp.abs(a) + 1),
        jnp.abs(a) ** 1.7,
        jax.lax.rsqrt(jnp.abs(a)),
        jnp.atan2(a, 2.0),
        jax.scipy.special.erf(a),
        jax.nn.gelu(a),
    ),
    "exp of extremes": lambda a: jnp.exp(jnp.where(a > 0, -jnp.inf, a * 100)),
    "sums": lambda a: (a.sum(), a.sum(1), a.sum(0), a.mean()),
    "softmax": lambda a: jax.nn.softmax(a),
    "causal softmax": lambda a: jax.nn.softmax(
        jnp.where(jnp.tril(jnp.ones((100, 130), bool)), a, -jnp.inf)
    ),
    "matmul": lambda a, b: (a @ b, (b.T @ a.T) + 1, a[0] @ b, a @ b[:, 0]),
    "matmul, bias, relu": lambda a, b: jax.nn.relu(a @ b + jnp.arange(70.0)),
    "matmul, bias, gelu": lambda a, b: jax.nn.gelu(a @ b + jnp.arange(70.0)),
    "batched matmul": lambda a, b: (
        jnp.einsum("bij,jk->bik", a.reshape(4, 25, 130), b),
        jnp.einsum("bij,bkj->bik", a.reshape(4, 25, 130), a.reshape(4, 25, 130)),
        jnp.einsum("bij,bik->bjk", a.reshape(4, 25, 130), a.reshape(4, 25, 130)),
    ),
    "random": lambda a: jax.random.normal(jax.random.key(3), (1000,)) + a[0, 0],
    "scatter": lambda a: (
        jnp.zeros((30, 130)).at[jnp.arange(100) % 30].add(a),
        jnp.zeros((30, 130)).at[jnp.arange(100) % 30].max(a),
    ),
    "cumsum": lambda a: (jnp.cumsum(a, 0), jnp.cumsum(a, 1)),
    "scan": lambda a: jax.lax.scan(lambda c, x: (jnp.tanh(c + x), c.sum()), jnp.zeros(130), a),
    "while": lambda a: jax.lax.while_loop(
        lambda c: c.sum() < 1e3, lambda c: c * 1.5 + 1, jnp.abs(a)
    ),
    "layer norm": lambda a: jax.grad(
        lambda a: (
            ((a - a.mean(1, keepdims=True)) * jax.lax.rsqrt(a.var(1, keepdims=True) + 1e-5)) ** 3
        ).sum()
    )(a),
    "cross entropy": lambda a: jax.value_and_grad(
        lambda a: (
            -jnp.take_along_axis(jax.nn.log_softmax(a), (jnp.arange(100) % 130)[:, None], 1).mean()
        )
    )(a),
}
CONVOLUTIONS: dict[str, Function] = {
    "conv": lambda x, w: (_conv(x, w), _conv(x, w, 2), _conv(x, w, rhs_dilation=(2, 2))),
    "conv, bias, relu": lambda x, w: jax.nn.relu(_conv(x, w) + jnp.arange(16.0)),
    "conv, side input": lambda x, w: jax.nn.relu(_conv(x, w) * 0.5 + jnp.concatenate([x, x], -1)),
    "conv transposed": lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"),
    "conv in groups": lambda x, w: (
        _conv(x, w[:, :, :2], feature_group_count=4),
        _conv(x, w[:, :, :1], feature_group_count=8),
    ),
    "conv gradients": _gradients(lambda x, w: _conv(x, w, 2)),
    "conv, relu, gradients": _gradients(lambda x, w: jax.nn.relu(_conv(x, w) + 1)),
    "conv in 3D, gradients": _gradients(_conv3d),
    "max pool": _gradients(lambda x: _pool(x, -jnp.inf, jax.lax.max, 2, "VALID")),
    "average pool": _gradients(lambda x: _pool(x, 0.0, jax.lax.add, 3, "SAME")),
    "batch norm": _gradients(
        lambda x: ((x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-3)) ** 2
    ),
    "resize": lambda x: jax.image.resize(x, (2, 24, 24, 8), "bilinear"),
}
HALVES: dict[str, Function] = {
    "bfloat16": _half(lambda a: (a * 3, jnp.tanh(a).sum(1), jnp.exp(a)), jnp.bfloat16),
    "float16": _half(lambda a: (a * 3 + jnp.exp(a), a.max(1)), jnp.float16),
    "bfloat16 matmul": _half(lambda a, b: a @ b, jnp.bfloat16),
    "float16 matmul": _half(lambda a, b: a @ b, jnp.float16),
    "bfloat16 conv": _half(_gradients(lambda x, w: _conv(x, w)), jnp.bfloat16),
}
GROUPS = {
    "elements": (ELEMENTS, 1e-7),
    "sums": (SUMS, 5e-6),
    "convolutions": (CONVOLUTIONS, 5e-6),
    "halves": (HALVES, 2e-2),
}


def compare(group: str) -> dict[str, list[float]]:
    """The largest error of each function of a group and what is allowed."""
    functions, tolerance = GROUPS[group]
    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    assert gpu.platform == "gpu"

    @jax.jit
    def all_of_them(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: f(*(arrays[arg] for arg in inspect.signature(f).parameters))
            for name, f in functions.items()
        }

    got = jax.tree.map(np.asarray, all_of_them(jax.device_put(ARRAYS, gpu)))
    want = jax.tree.map(np.asarray, all_of_them(jax.device_put(ARRAYS, cpu)))
    return {
        name: [max(map(_error, jax.tree.leaves(got[name]), jax.tree.leaves(want[name]))), tolerance]
        for name in functions
    }


def _error(got: Any, want: Any) -> float:
    """The largest difference over the largest finite element; infinite where only one of the two is a number."""
    got, want = (
        np.atleast_1d(np.asarray(got, np.float64)),
        np.atleast_1d(np.asarray(want, np.float64)),
    )
    if (np.isfinite(got) != np.isfinite(want)).any():
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.where(got == want, 0, np.abs(got - want))
    return float(
        np.nanmax(np.nan_to_num(difference)) / (1e-6 + np.max(np.abs(want[np.isfinite(want)])))
    )
