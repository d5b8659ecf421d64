"""Every rule against its meaning: an equation on the parts, put together again, is the equation on the whole."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memplan.program.flat import flatten
from memplan.program.ops import Axes, axes_of
from tests.program.ops.division import check_parts, divisible

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def whole_numbers(top: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, top, shape).astype(np.int32)


def grad_of(function: Callable[..., Any], *args: int) -> Callable[..., Any]:
    return jax.grad(lambda *operands: (function(*operands) ** 2).sum(), argnums=args or 0)


def pooled(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (2, 2), (2, 2))


def convolved(groups: int) -> Callable[..., jax.Array]:
    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return apply


STEPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise with a repeated dimension": (lambda a, b: jnp.tanh(a * b + 2.0), (floats(4, 6), floats(4, 1))),
    "clamp and select": (lambda a: jnp.where(a > 0, jnp.clip(a, -1, 1), a.astype(jnp.float16)), (floats(4, 6),)),
    "sums": (lambda a: (a.sum((0, 2)), a.max(0), a.min(1), (a > 0).any(0), (a > 0).all(2)), (floats(4, 6, 2),)),
    "argmax and cumsum": (lambda a: (a.argmax(1), jnp.cumsum(a, 0), jax.lax.top_k(a, 2)[0]), (floats(4, 6),)),
    "views": (lambda a: jnp.flip(a.reshape(8, 3, 2).transpose(1, 0, 2), 1).reshape(3, 4, 4)[None], (floats(4, 6, 2),)),
    "merged and parted": (lambda a: a.reshape(24, 2).reshape(2, 12, 2), (floats(4, 6, 2),)),
    "a batched product": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (floats(4, 6, 2), floats(4, 2, 8))),
    "a product over the batch": (lambda a, b: a.T @ b, (floats(4, 6), floats(4, 2))),
    "a convolution": (convolved(1), (floats(4, 8, 8, 6), floats(3, 3, 6, 2))),
    "its gradients": (grad_of(convolved(1), 0, 1), (floats(4, 8, 8, 6), floats(3, 3, 6, 2))),
    "a grouped convolution": (convolved(2), (floats(4, 8, 8, 6), floats(3, 3, 3, 4))),
    "gradients of a grouped one": (grad_of(convolved(2), 0, 1), (floats(4, 8, 8, 6), floats(3, 3, 3, 4))),
    "a pool and its gradient": (grad_of(pooled), (floats(4, 8, 8, 2),)),
    "slices": (lambda a: (a[:, 1:3], jnp.pad(a, ((0, 0), (1, 2))), jnp.concatenate([a, a], 1)), (floats(4, 6),)),
    "dynamic slices": (
        lambda a, i: jax.lax.dynamic_update_slice(a, jax.lax.dynamic_slice(a, (0, i), (4, 2)) + 1, (0, 2)),
        (floats(4, 6), np.int32(3)),
    ),
    "rows by index, and their gradient": (
        jax.grad(lambda table, rows: (table[rows] ** 2).sum()), (floats(10, 4), whole_numbers(10, 4, 6)),
    ),
    "one of each row": (lambda a, i: jnp.take_along_axis(a, i[:, None], 1), (floats(4, 6), whole_numbers(6, 4))),
    "counting": (lambda a: a + jax.lax.broadcasted_iota(jnp.float32, (4, 6), 1), (floats(4, 6),)),
    "sorting": (lambda a: jnp.sort(a, axis=1), (floats(4, 6),)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_an_equation_on_the_parts_put_together_is_the_equation_on_the_whole(name: str) -> None:
    function, args = STEPS[name]
    assert check_parts(function, args, 2, 2e-5)


def test_an_inner_dimension_that_is_merged_with_an_outer_one_is_not_divided() -> None:
    (eqn,) = jax.make_jaxpr(lambda a: a.reshape(24))(floats(4, 6)).jaxpr.eqns
    axes = axes_of(eqn)
    assert axes.operands == ((0, None),) and axes.results == ((0,),)


@pytest.mark.parametrize(
    "scan", [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]
)
def test_what_is_cumulative_is_carried_forward_and_divided_along_other_dimensions_alone(
    scan: Any,
) -> None:
    """Complex numbers, of which none is the least, and what is cumulative from the last row on are not carried."""
    x = jnp.ones((4, 6))
    eqns = jax.make_jaxpr(lambda x: (scan(x, 1), scan(x, 1, True), scan(lax.complex(x, x), 1)))(
        x
    ).jaxpr.eqns
    forward, *not_carried = (axes_of(eqn) for eqn in eqns if eqn.primitive.name != "complex")
    assert forward == Axes(((0, 1),), ((0, 1),), carried=(1,))
    assert not_carried == [Axes(((0, None),), ((0, None),))] * 2
    assert forward and divisible(forward, 0, eqns[0], 2) and not divisible(forward, 1, eqns[0], 2)


def test_what_has_no_rule_has_no_axes() -> None:
    (eqn,) = jax.make_jaxpr(jnp.linalg.cholesky)(np.eye(4, dtype=np.float32)).jaxpr.eqns[-1:]
    assert axes_of(eqn) is None


@pytest.mark.parametrize(
    "activation", [jnp.tanh, jax.nn.gelu, jax.nn.sigmoid, jax.nn.silu, jax.nn.softplus, jax.nn.elu]
)
def test_nothing_in_the_gradient_of_an_activation_lacks_a_rule(
    activation: Callable[..., jax.Array],
) -> None:
    closed = flatten(jax.make_jaxpr(grad_of(activation))(floats(4, 6)))
    assert [str(eqn) for eqn in closed.jaxpr.eqns if axes_of(eqn) is None] == []
