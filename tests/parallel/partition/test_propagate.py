"""Steps that were once divided wrongly, slowly or not at all, each on simulated devices against one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.parallel.partition.placement import Layout, split
from memplan.parallel.step import DataParallel, data_parallel
from tests.parallel.partition.simulated import mesh, program_of, raw, simulated, steps_of

ROWS, FEATURES = 24, 6
Step = Callable[..., Any]


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


W, X = array(FEATURES, FEATURES, seed=1), array(ROWS, FEATURES)
LABELS = jnp.arange(ROWS) % FEATURES


def same(step: Step, *args: Any, sizes: Sequence[int] = (4,), **options: Any) -> tuple[DataParallel, list[str]]:
    """Checks the numbers of one step; the divided step, and what it said."""
    divided = data_parallel(step, mesh(sizes), **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        found = simulated(divided, *args)
    for expected, one in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(found), strict=True):
        wide = np.float32 if raw(expected).dtype == jnp.bfloat16 else raw(expected).dtype
        np.testing.assert_allclose(raw(one).astype(wide), raw(expected).astype(wide), rtol=2e-5, atol=2e-6)
    return divided, [str(one.message) for one in told]


def outputs(divided: DataParallel, *args: Any) -> list[Layout]:
    return list(divided.divided(args).assigned.outputs)


def collectives(divided: DataParallel, *args: Any) -> set[str]:
    """Those that one device takes part in."""
    made = {eqn.primitive.name for eqn in program_of(divided, *args).jaxpr.eqns}
    return made & {"all_gather", "psum", "all_to_all", "reduce_scatter"}


# Random draws.


@pytest.mark.parametrize("kind", [jax.random.key, jax.random.PRNGKey, lambda seed: jax.random.key(seed, impl="rbg")])
@pytest.mark.parametrize("features", [4, 8])
def test_every_example_draws_from_its_own_key(kind: Callable[[int], jax.Array], features: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(key: jax.Array, row: jax.Array) -> Any:
            drops = jax.random.bernoulli(key, 0.5, row.shape)
            return row + jax.random.normal(key, row.shape), drops, jax.random.permutation(key, row)

        return jax.vmap(one)(jax.random.split(kind(0), x.shape[0]), x)

    divided, _ = same(step, W, array(ROWS, features))
    if "rbg" not in str(kind(0).dtype):
        assert outputs(divided, W, array(ROWS, features))[0] == split(0)


# Messages.


def test_compressed_parts_that_hosts_do_not_divide_come_back_trimmed() -> None:
    """3 hosts of 2 devices, and 724 x 724 weights: neither a half nor a sixth of them is a multiple of 3."""
    width, rows = 724, 12

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return (jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).sum() / rows

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), value

    weights, x = [array(width, width, seed=seed) / width**0.5 for seed in (1, 2)], array(rows, width)
    divided = data_parallel(step, mesh((3, 2)), compress="bfloat16")
    found, value = simulated(divided, weights, x)
    expected, plain = step(weights, x)
    assert any("bfloat16" in one.how for one in divided.sums)
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    for w, one, other in zip(weights, found, expected, strict=True):
        w, one, other = map(np.asarray, (w, one, other))
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other - w)


def test_no_reduce_scatter_is_left_to_gloo() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.9 * state["m"], "m": 0.9 * state["m"] + gradient}

    state = {"w": array(8, 8), "m": array(8, 8, seed=1)}
    here = jax.make_mesh((1, 1), ("host", "device"))
    divided, _ = same(step, state, array(ROWS, 8), split_state="m")
    assert "reduce_scatter" in collectives(divided, state, array(ROWS, 8))
    divided.mesh = here  # of a CPU
    assert collectives(divided, state, array(ROWS, 8)) == {"all_to_all", "all_gather"}


# What stays divided, and what is said where it cannot.


def test_the_commonest_loss_gathers_nothing() -> None:
    def step(w: jax.Array, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w, batch[1]).mean()

        return jax.value_and_grad(loss)(w)

    divided, told = same(step, W, (X, LABELS))
    assert not told and collectives(divided, W, (X, LABELS)) == {"psum"}


def test_maps_along_the_batch_are_divided() -> None:
    divided, told = same(lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x), W, X)
    assert not told and not collectives(divided, W, X) and outputs(divided, W, X) == [split(0)]


def twice(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.concatenate([x @ w, 2 * x @ w]) @ w)


def halves(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh((x @ w).reshape(2, -1)) * 2


def ordered(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sort(x @ w, axis=0) @ w)


@pytest.mark.parametrize(("step", "name"), [(twice, "concatenate"), (halves, "reshape"), (ordered, "sort")])
def test_what_follows_a_gather_is_divided_and_the_gather_is_told_with_its_line(step: Step, name: str) -> None:
    divided, told = same(step, W, X)
    assert all(layout.is_split for layout in outputs(divided, W, X))
    assert told and all(f"{name} at " in one and "test_propagate.py:" in one for one in told)


def test_microbatches_within_a_step_are_divided() -> None:
    """8 microbatches of 3 over 4 devices, and 2 of 12: the first are scanned along what is divided."""

    def step(count: int) -> Step:
        def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
            def trip(total: jax.Array, part: jax.Array) -> Any:
                return total + jax.grad(lambda w: (jnp.tanh(part @ w) ** 2).sum())(w), None

            return jax.lax.scan(trip, jnp.zeros_like(w), x.reshape(count, -1, FEATURES))[0]

        return accumulated

    for count in (2, 6):
        divided, _ = same(step(count), W, X)
        assigned = divided.divided((W, X)).assigned
        (scan,) = (one for eqn, one in steps_of(assigned) if eqn.primitive.name == "scan")
        assert any(inner.factor is not None for inner in scan.bodies[0].steps)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_the_gradients_of_plain_sgd_travel_in_buckets_too(momentum: float | None) -> None:
    optimizer = optax.sgd(0.1, momentum)

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            hidden = x
            for w in weights:
                hidden = jnp.tanh(hidden @ w)
            return (hidden**2).mean()

        weights, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(loss)(weights), opt_state)
        return optax.apply_updates(weights, updates), opt_state

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 24
    state = weights, jax.eval_shape(optimizer.init, weights)
    divided = data_parallel(step, mesh((2, 4)), device="v100")
    buckets = divided.divided((state, jax.ShapeDtypeStruct((4096, 2048), jnp.float32))).buckets
    sizes = np.bincount([number for number in buckets.number.values() if number >= 0]) * 2**24
    assert sizes.sum() == 24 * 2**24 and len(sizes) >= 4 and sizes[-1] <= 2**26


# What is outside of the numbers.


def test_a_mean_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("mean {}", x.mean())
        return w * x.sum()

    here = data_parallel(step, jax.make_mesh((1,), ("device",)))
    np.testing.assert_allclose(jax.jit(here)(W, X), W * X.sum(), rtol=1e-5)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1


def test_arguments_may_be_named() -> None:
    def step(state: jax.Array, batch: jax.Array, rate: float = 0.1, *, scale: float = 2.0) -> jax.Array:
        return state - rate * scale * (batch @ state).sum(0)

    divided = jax.jit(data_parallel(step, jax.make_mesh((1,), ("device",))))
    for args, kwargs in [((W,), {"batch": X}), ((W, X), {"rate": 0.5}), ((), {"state": W, "batch": X, "scale": 1.0})]:
        np.testing.assert_allclose(divided(*args, **kwargs), step(*args, **kwargs), rtol=1e-5)
    with pytest.raises(MemplanError, match=r"does not take these arguments: missing a required argument: 'batch'"):
        divided(W, bacth=X)


HERE = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))
PART = NamedSharding(HERE, PartitionSpec("device"))


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda w, x: jax.lax.with_sharding_constraint(x @ w, PART), "sharding_constraint at .*says where arrays lie"),
        (lambda w, x: jax.jit(jnp.tanh, in_shardings=PART)(x @ w), "jit at .*says where arrays lie"),
        (
            lambda w, x: jax.shard_map(jnp.tanh, mesh=HERE, in_specs=PART.spec, out_specs=PART.spec)(x),
            "shard_map at .*written for several devices already",
        ),
        (lambda w, x: io_callback(np.tanh, x, x), "io_callback at .*each device would"),
        (lambda w, x: jax.lax.map(lambda r: (jax.debug.print("{}", r[0], ordered=True), r)[1], x), "ordered=False"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_line(step: Step, told: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=told) as refused:
        data_parallel(step, mesh((4,))).divided((W, X))
    assert "test_propagate.py:" in str(refused.value)


def test_whole_numbers_are_divided_after_they_are_summed() -> None:
    same(lambda w, x: jnp.round(x * 7).astype(jnp.int32).sum(0) // 2, W, X)


def test_a_sum_is_rounded_once() -> None:
    """In bfloat16 the sum of rounded terms would be another number."""
    x = jnp.asarray(np.random.default_rng(0).integers(-2000, 2000, (ROWS, 1)), jnp.float32)
    same(lambda w, x: x.sum(0).astype(jnp.bfloat16).astype(jnp.float32), W, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("at", range(4))
def test_what_is_not_a_number_is_not_lost_in_a_maximum(at: int, dtype: Any) -> None:
    x = jnp.asarray([[0.0, -jnp.inf, -1.0], [1.0, 3.0, -2.0], [-2.0, jnp.inf, -3.5], [-0.0, 2.0, -4.0]], dtype)
    for given in (x, x.at[at, 0].set(jnp.nan), x.at[at, 0].set(-jnp.nan)):
        same(lambda w, x: (x.max(0), x.min(0), x.max(), x.min()), W, given)
