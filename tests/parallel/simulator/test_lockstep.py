"""Simulated devices against jax itself: collectives against nested `vmap`, and control flow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.parallel.simulator.against_jax import Function, assert_close, assert_same, compiled, floats, ints, plain
from tests.parallel.simulator.lockstep import lockstep
from tests.parallel.simulator.simulated import raw

X, KEY = floats(3, 5), jax.random.key(7)
NHWC = ("NHWC", "HWIO", "NHWC")


def assert_same_on_devices(function: Function, sizes: Mapping[str, int], *args: Any, tolerance: float = 2e-5) -> None:
    """`args` have a leading dimension of devices; nested `vmap` is who knows."""
    count = math.prod(sizes.values())
    run: Function = function
    for name in reversed(sizes):
        run = jax.vmap(run, axis_name=name)
    apart = jax.tree.map(lambda x: x.reshape(*sizes.values(), *x.shape[1:]), args)
    expected = [raw(x).reshape(count, *raw(x).shape[len(sizes) :]) for x in jax.tree.leaves(compiled(run)(*apart))]
    locals_ = jax.tree.map(lambda x: x[0], args)
    closed = jax.make_jaxpr(function, axis_env=list(sizes.items()))(*locals_)
    found = lockstep(closed, [list(leaf) for leaf in jax.tree.leaves(args)], sizes)
    for values, wanted in zip(found, expected, strict=True):
        for value, one in zip(values, wanted, strict=True):
            assert_close(value, one, tolerance)


MESHES: list[tuple[dict[str, int], Any]] = [
    ({"a": 2}, "a"),
    ({"a": 3}, "a"),
    ({"a": 2, "b": 3}, "a"),
    ({"a": 2, "b": 3}, "b"),
    ({"a": 2, "b": 3}, ("a", "b")),
    ({"a": 2, "b": 3}, ("b", "a")),
    ({"a": 2, "b": 2, "c": 2}, "b"),
    ({"a": 2, "b": 2, "c": 2}, ("c", "a")),
]


def _together(x: Any, axis: Any, count: int) -> list[Any]:
    """Everything that is sent along an axis, or a tuple of them."""
    around = [(place, (place + 1) % count) for place in range(count)]
    return [
        *(lax.psum((x, x[0] * 2), axis), lax.pmean(x, axis), lax.pmax(x, axis), lax.pmin(x, axis)),
        *(lax.all_gather(x, axis), lax.all_gather(x, axis, axis=1), lax.all_gather(x, axis, axis=1, tiled=True)),
        lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
        lax.psum_scatter(x[:, :count], axis, scatter_dimension=1),
        *(lax.all_to_all(x, axis, 1, 0, tiled=True), lax.all_to_all(x, axis, 1, 1, tiled=True)),
        *(lax.all_to_all(x[:, :count], axis, 1, 0), lax.all_to_all(x[:, :count], axis, 1, 1)),
        *(lax.axis_index(axis), lax.axis_size(axis), lax.ppermute(x, axis, around)),
    ]


@plain
@pytest.mark.parametrize(("sizes", "axis"), MESHES, ids=str)
def test_collectives(sizes: Mapping[str, int], axis: Any) -> None:
    """`vmap` does not know them all over several axes: there it is over a single one, of the devices in that order."""
    names, shape = list(sizes), list(sizes.values())
    dims = [names.index(name) for name in (axis if isinstance(axis, tuple) else (axis,))]
    count, x = math.prod(shape[dim] for dim in dims), floats(math.prod(shape), 4, 24)
    order = np.moveaxis(np.arange(len(x)).reshape(shape), dims, range(-len(dims), 0)).reshape(-1, count)
    over_one = jax.vmap(jax.vmap(lambda x: _together(x, "one", count), axis_name="one"))
    closed = jax.make_jaxpr(lambda x: _together(x, axis, count), axis_env=list(sizes.items()))(x[0])
    found = lockstep(closed, [list(x)], sizes)
    for values, wanted in zip(found, map(raw, jax.tree.leaves(compiled(over_one)(x[order]))), strict=True):
        for device, one in zip(order.ravel(), wanted.reshape(-1, *wanted.shape[2:]), strict=True):
            assert_close(values[device], one)


@plain
def test_permutations_by_hand() -> None:
    """`vmap` does not know those that leave somebody out."""
    sizes, x = {"a": 2, "b": 3}, floats(6, 4)

    def function(x: Any) -> Any:
        return lax.ppermute(x, ("b", "a"), [(0, 1), (3, 0)]), lax.pbroadcast(x, "b", 1)

    closed = jax.make_jaxpr(function, axis_env=list(sizes.items()))(x[0])
    sent, from_one = lockstep(closed, [list(x)], sizes)
    nothing = np.zeros(4, np.float32)
    np.testing.assert_array_equal(sent, [x[4], nothing, nothing, x[0], nothing, nothing])
    np.testing.assert_array_equal(from_one, [x[1]] * 3 + [x[4]] * 3)


@plain
def test_collectives_of_other_types() -> None:
    def function(x: Any, key: Any) -> Any:
        drawn = jax.random.uniform(jax.random.fold_in(key, lax.axis_index("a")), (2,))
        return lax.psum(x, "a"), lax.pmax(x, "b"), lax.psum(x.astype(jnp.int32), ("a", "b")), drawn

    x = floats(6, 4, dtype=ml_dtypes.bfloat16)
    assert_same_on_devices(function, {"a": 2, "b": 3}, x, jax.random.split(KEY, 6))


@plain
def test_gathered_keys() -> None:
    closed = jax.make_jaxpr(lambda key: lax.all_gather(key, "a"), axis_env=[("a", 2)])(KEY)
    keys = jax.random.split(KEY)
    ((first, second),) = lockstep(closed, [list(keys)], {"a": 2})
    assert first is second
    assert_close(first, keys)


@plain
def test_control_flow_with_collectives() -> None:
    def function(x: Any, n: Any) -> Any:
        def trip(carry: Any, row: Any) -> Any:
            carry = lax.psum(carry * 0.5, "a") + row
            return carry, (lax.all_gather(row, "b"), carry.sum())

        forth = lax.scan(trip, x[0], x)
        back = lax.scan(trip, x[0], x, reverse=True)
        loop = lax.fori_loop(0, 3, lambda i, c: lax.pmean(c, "b") + i, x)
        same = lax.cond(lax.psum(n, ("a", "b")) > 0, lambda x: lax.psum(x, "a"), lambda x: -x, x)
        whole = lax.while_loop(lambda c: lax.pmax(c.max(), ("a", "b")) < 9, lambda c: c + 1, x)
        inside = jax.checkpoint(jax.jit(lambda x: lax.psum(jnp.sin(x), "b")))(x)
        return forth, back, loop, same, whole, inside, jax.nn.relu(x)

    assert_same_on_devices(function, {"a": 2, "b": 3}, floats(6, 4, 3), ints(6))


@plain
def test_devices_go_their_own_ways() -> None:
    def function(x: Any, n: Any) -> Any:
        chosen = lax.switch(n, [lambda x: (x, n), lambda x: (x * 2, n + 1), lambda x: (-x, n)], x)
        count = lax.while_loop(lambda c: c[0] < n * n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))
        by_row = lax.cond(lax.axis_index("a") == 0, lambda x: x + 1, lambda x: x - 1, x)
        return chosen, count, by_row

    assert_same_on_devices(function, {"a": 2, "b": 3}, floats(6, 4), np.arange(6, dtype=np.int32))


def test_a_collective_within_a_group_that_agrees() -> None:
    def function(x: Any) -> Any:
        return lax.cond(lax.axis_index("a") == 0, lambda x: lax.psum(x, "b"), lambda x: x, x)

    sizes, x = {"a": 2, "b": 3}, floats(6, 4)
    closed = jax.make_jaxpr(function, axis_env=list(sizes.items()))(x[0])
    (found,) = lockstep(closed, [list(x)], sizes)
    np.testing.assert_allclose(np.stack(found), [x[:3].sum(0)] * 3 + list(x[3:]), rtol=2e-5)

    closed = jax.make_jaxpr(
        lambda x: lax.cond(x.sum() > 0, lambda x: lax.psum(x, "b"), lambda x: x, x), axis_env=[("b", 2)]
    )(x[0])
    with pytest.raises(ValueError, match="not all devices"):
        lockstep(closed, [[np.ones(4, np.float32), -np.ones(4, np.float32)]], {"b": 2})


def test_loops_over_nothing() -> None:
    assert_same(lambda x: lax.scan(lambda c, row: (c + row, c), x.sum(), x), floats(0))
    assert_same(lambda x: lax.scan(lambda c, row: (c + 1, c * 2), x, None, length=3), np.float32(2))
    assert_same(lambda keys: lax.scan(lambda c, key: (key, c), KEY, keys), jax.random.split(KEY, 3))


@plain
def test_what_all_share_is_computed_once() -> None:
    def function(x: Any, y: Any) -> Any:
        return jnp.sin(x) + 1, jnp.sin(y), lax.psum(y, "a")

    x, y = floats(3), floats(4, 3)
    closed = jax.make_jaxpr(function, axis_env=[("a", 2), ("b", 2)])(x, y[0])
    shared, own, summed = lockstep(closed, [[x] * 4, list(y)], {"a": 2, "b": 2})
    assert len(set(map(id, shared))) == 1
    assert len(set(map(id, own))) == 4
    assert [value is summed[0] for value in summed] == [True, False, True, False]


@plain
def test_what_is_left_as_it_is() -> None:
    def function(x: Any) -> Any:
        x = lax.stop_gradient(checkpoint_name(jnp.copy(x), "x"))
        return lax.optimization_barrier((jax.device_put(x), x)), jax.nn.silu(x)

    printed: list[Any] = []
    assert_same(function, X)
    closed = jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(X)
    assert lockstep(closed, [[X]], {}, printed) == []
    assert len(printed) == 1
    np.testing.assert_array_equal(printed[0][1][0][0], X)


def _loss(weights: Any, x: Any, labels: Any, axis: str | None) -> Any:
    def mean(x: Any, axes: Any) -> Any:
        return lax.pmean(x.mean(axes), axis) if axis else x.mean(axes)

    kernel, scale, bias, dense = weights
    y = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NHWC)
    centre = mean(y, (0, 1, 2))
    y = (y - centre) * lax.rsqrt(mean((y - centre) ** 2, (0, 1, 2)) + 1e-5) * scale + bias
    y = lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    logits = jax.nn.log_softmax(y.reshape(y.shape[0], -1) @ dense)
    return -mean(jnp.take_along_axis(logits, labels[:, None], 1), (0, 1))


@plain
@pytest.mark.parametrize("sizes", [{}, {"a": 2}], ids=str)
def test_a_training_step(sizes: Mapping[str, int]) -> None:
    weights = floats(3, 3, 3, 4), floats(4), floats(4), floats(16, 5)
    x, labels = floats(4, 8, 8, 3), ints(4, low=0, high=5)

    def step(weights: Any, x: Any, labels: Any) -> Any:
        return jax.value_and_grad(_loss)(weights, x, labels, "a" if sizes else None)

    if sizes:
        apart = [np.stack([leaf] * 2) for leaf in weights]
        args = tuple(apart), x.reshape(2, 2, *x.shape[1:]), labels.reshape(2, 2)
        assert_same_on_devices(step, sizes, *args, tolerance=1e-4)
    else:
        assert_same(step, weights, x, labels, tolerance=1e-4)
