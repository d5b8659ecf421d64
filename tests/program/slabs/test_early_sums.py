"""Sums behind fewer walls: how many loops are left, and the same numbers, with slabs and without."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.slabs.slabs import Slabs, Walls
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.slabs.axis import slab_axis
from memplan.program.slabs.early_sums import early_sums
from memplan.program.slabs.write import in_slabs
from memplan.program.trace import trace
from models.train import unet3d_step
from models.unet import InstanceNorm
from tests.arrays import assert_close, assert_near
from tests.program.scans import QUICK

SHAPE, DIM, ROWS = (2, 8, 4, 6), 1, 3  # the last slab of three has two rows


def normals(mean: float = 0.0, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(mean, 1, shape), jnp.float32)


def flat(function: Callable[..., Any], *args: Any) -> compat.ClosedJaxpr:
    return flatten(jax.make_jaxpr(function)(*args))


def early(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return early_sums(slab_axis(Flat(closed), closed.jaxpr.invars[0], DIM)).closed


def everything(closed: compat.ClosedJaxpr) -> tuple[Any, Slabs]:
    """All that can be in slabs, along the axis through the first argument."""
    axis = slab_axis(Flat(closed), closed.jaxpr.invars[0], DIM)
    return axis, Slabs(0, DIM, ROWS, frozenset(axis.graph.along), frozenset(), frozenset())


def loops(closed: compat.ClosedJaxpr) -> int:
    axis, slabs = everything(closed)
    return len(Walls(axis.graph, slabs.ops).loops(slabs))


def primitives_of(closed: compat.ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def all_results(programs: Sequence[compat.ClosedJaxpr], *args: Any) -> list[list[np.ndarray]]:
    """By program; compiled in one go, which is quicker."""
    run = jax.jit(
        lambda leaves: [interpret(closed, leaves) for closed in programs], compiler_options=QUICK
    )
    results = run(jax.tree.leaves(args))
    return [[np.asarray(result, np.float64) for result in each] for each in results]


def results(closed: compat.ClosedJaxpr, *args: Any) -> list[np.ndarray]:
    return all_results([closed], *args)[0]


def assert_same_numbers(closed: compat.ClosedJaxpr, *args: Any, within: float = 2e-5) -> None:
    """As they are, with early sums, and those in slabs."""
    new = early(closed)
    plain, *variants = all_results([closed, new, in_slabs(*everything(new))], *args)
    for variant in variants:
        assert_near(variant, plain, within)


def trained(norm: nn.Module) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loss and gradients of a norm between a product and a ReLU."""
    x, weights = normals(), normals(seed=1)
    variables_of = norm.init(jax.random.key(0), x)

    def loss(x: Any, params: Any, weights: Any) -> Any:
        y, _ = norm.apply({**variables_of, "params": params}, x * weights, mutable=["batch_stats"])
        return jnp.sum(jax.nn.relu(y) * weights)

    return jax.value_and_grad(loss, argnums=(0, 1)), (x, variables_of["params"], weights)


NORMS = {
    "instance": (InstanceNorm(), 5, 3),
    "batch": (nn.BatchNorm(False, use_fast_variance=False), 5, 3),
    "group": (nn.GroupNorm(2, use_fast_variance=False), 5, 3),
    "batch, by the mean of squares": (nn.BatchNorm(False), 3, 3),
    "group, by the mean of squares": (nn.GroupNorm(2), 3, 3),
    "layer": (nn.LayerNorm(), 1, 1),
}


@pytest.mark.parametrize(
    "name",
    [
        "instance",
        "batch, by the mean of squares",
        "layer",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("batch", "group", "group, by the mean of squares")
        ),
    ],
)
def test_a_norm_has_one_wall_forward_and_one_backward(name: str) -> None:
    norm, before, after = NORMS[name]
    function, args = trained(norm)
    closed = flat(function, *args)
    assert (loops(closed), loops(early(closed))) == (before, after)
    assert_same_numbers(closed, *args)


SPREADS = {
    "var": lambda x: jnp.var(x, (1, 2)),
    "var over the axis alone": lambda x: jnp.var(x, 1),
    "var of all, by one less": lambda x: jnp.var(x, ddof=1),
    "std": lambda x: jnp.std(x, (0, 1, 3), keepdims=True),
}


@pytest.mark.parametrize("name", SPREADS)
def test_a_variance_is_added_up_in_one_loop_and_its_gradient_made_in_the_next(name: str) -> None:
    function = jax.value_and_grad(lambda x: jnp.sum(SPREADS[name](jnp.sin(x)) ** 3))
    closed = flat(function, normals())
    assert (loops(closed), loops(early(closed))) == (4, 2)
    assert "squares_about_mean" in primitives_of(early(closed))
    assert_same_numbers(closed, normals())


def test_a_step_of_a_unet_goes_through_its_volumes_half_as_often() -> None:
    """14 instance norms: of 54 loops at best 14 of the variances and 14 of the gradients of the means can go."""
    step, args = unet3d_step(32, filters=4)
    flat = trace(step, args, {}, {}).flat
    largest = max(flat.values, key=lambda var: compat.nbytes_of(var.aval))
    new = early_sums(slab_axis(flat, largest, DIM))

    def loops_of(flat: Flat) -> int:
        axis = slab_axis(flat, largest, DIM)
        slabs = Slabs(
            flat.number_of[largest], DIM, 8, frozenset(axis.graph.along), frozenset(), frozenset()
        )
        return len(Walls(axis.graph, slabs.ops).loops(slabs))

    assert primitives_of(new.closed).count("squares_about_mean") == 14
    assert loops_of(flat) - loops_of(new) == 28


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_variance_far_from_zero_is_at_least_as_exact_in_slabs_as_without(mean: float) -> None:
    x = normals(mean)
    closed = flat(lambda x: jnp.var(x, (1, 2)), x)
    exact = np.asarray(x, np.float64).var((1, 2))
    np.testing.assert_allclose(results(closed, x)[0], exact, rtol=3e-5)
    for variant in (early(closed), in_slabs(*everything(early(closed)))):
        np.testing.assert_allclose(results(variant, x)[0], exact, rtol=1e-6)


def test_what_is_multiplied_by_something_late_is_summed_before_that_is_known() -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        late = jnp.tanh(x.sum((1, 2), keepdims=True))
        return (-(x * late / 3 + late - w * late)).sum((1, 2))

    closed = flat(function, normals(), normals(seed=1))
    assert (loops(closed), loops(early(closed))) == (2, 1)
    assert_same_numbers(closed, normals(), normals(seed=1))


STAYS = {
    "a product with what is known at once": lambda x: (x * x[:, :1]).sum((1, 2)),
    "what differs along the axis": lambda x: (x * jnp.cumsum(x.sum((0, 1, 2)))[None, None, None]).sum(),
    "no linear function of what is late": lambda x: jnp.tanh(x * x.sum((1, 2), keepdims=True)).sum((1, 2)),
    "a quotient by an array": lambda x: (x.sum((1, 2), keepdims=True) / (2 + jnp.sin(x)) ** 2).sum((1, 2)),
    "a rounded sum": lambda x: (x * x.sum((1, 2), keepdims=True)).astype(jnp.bfloat16).sum((1, 2)),
    "over other dimensions": lambda x: (x * x.sum(1, keepdims=True)).sum((0, 2)),
    "whole numbers": lambda x: (x.astype(int) * x.astype(int).sum((1, 2), keepdims=True)).sum((1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_gains_nothing_stays_as_it_is(name: str) -> None:
    closed = flat(STAYS[name], normals())
    assert str(early(closed)) == str(closed)


def test_variables_that_stay_are_the_same_and_inputs_keep_their_names() -> None:
    function, args = trained(InstanceNorm())
    closed = flat(function, *args)
    new = early(closed)
    assert new.jaxpr.invars == closed.jaxpr.invars and new.jaxpr.outvars == closed.jaxpr.outvars
    assert compat.input_names(new) == compat.input_names(closed)
    results = [var for eqn in new.jaxpr.eqns for var in eqn.outvars]
    assert len(results) == len(set(results))


def test_a_sum_of_a_constant_stays_as_it_is() -> None:
    closed = flat(lambda x: (x / jnp.sum(np.float32(2))).sum(), normals())
    assert any(
        not compat.is_var(eqn.invars[0])
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "reduce_sum"
    )
    assert primitives_of(early(closed)) == primitives_of(closed)


def test_new_equations_name_the_line_of_the_sum_that_they_are_for() -> None:
    closed = flat(lambda x: jnp.var(x, (1, 2)), normals())
    (squares,) = (
        eqn for eqn in early(closed).jaxpr.eqns if eqn.primitive.name == "squares_about_mean"
    )
    assert "test_early_sums.py" in compat.source_of(squares)


def test_halves_are_added_up_in_float32() -> None:
    def function(x: jax.Array) -> jax.Array:
        late = jnp.tanh(x.sum((1, 2), keepdims=True))
        return jax.lax.reduce_sum(x * late + late, (1, 2))

    x = normals().astype(jnp.bfloat16)
    new = early(flat(function, x))
    assert loops(new) == 1 and compat.aval_of(new.jaxpr.outvars[0]).dtype == jnp.bfloat16
    exact = function(x.astype(jnp.float32))
    (total,) = results(new, x)
    np.testing.assert_allclose(total, exact, atol=0.02 * float(jnp.abs(exact).max()))


Draw = st.DrawFn


@st.composite
def programs(draw: Draw) -> list[tuple[str, int, int]]:
    """Instructions: what to do with two of the values that there are."""
    kinds = st.sampled_from(
        ["add", "sub", "mul", "div", "neg", "scale", "centre", "squares", "sum", "var", "bend"]
    )
    return draw(
        st.lists(st.tuples(kinds, st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=10)
    )


def run(
    program: list[tuple[str, int, int]], axes: tuple[int, ...], x: jax.Array, w: jax.Array
) -> list[jax.Array]:
    """Arrays and, apart, what is late and whole; all within bounds, so that rounding stays small."""
    arrays, late, sums = [x, w], [jnp.ones((1, 1, 1, 1))], []
    for kind, first, second in program:
        a, b = (arrays[number % len(arrays)] for number in (first, second))
        c = late[second % len(late)]
        match kind:
            case "add" | "sub":
                arrays.append((a + b if kind == "add" else a - b) / 2)
            case "mul":
                arrays.append(a * c)
            case "div":
                arrays.append(a / (2 + c))
            case "neg":
                arrays.append(-a)
            case "scale":
                arrays.append(a + jnp.broadcast_to(c, SHAPE))
            case "bend":
                arrays.append(jnp.tanh(a))
            case "centre":
                arrays.append(a - a.mean(axes, keepdims=True))
            case "squares":
                sums.append(jnp.square(a - a.mean(axes, keepdims=True)).sum(axes) / x.size)
            case "var":
                sums.append(a.var(axes))
            case "sum":
                sums.append((a * b if first % 2 else a).sum(axes) / x.size)
        if kind in ("squares", "var", "sum"):
            late.append(jnp.tanh(jnp.expand_dims(sums[-1], axes)))
    return [*(array.sum(axes) / x.size for array in arrays[2:]), *sums, *arrays[-1:]]


@given(
    programs(),
    st.sampled_from([(1,), (1, 2), (0, 1, 2), (0, 1, 2, 3)]),
    st.sampled_from([0.0, 3.0]),
)
@settings(max_examples=4, deadline=None)
def test_any_program_computes_the_same_in_no_more_loops(
    program: Any, axes: tuple[int, ...], mean: float
) -> None:
    x, w = normals(mean), normals(seed=1)
    closed = flat(functools.partial(run, program, axes), x, w)
    assert loops(early(closed)) <= loops(closed)
    new = early(closed)
    plain, *variants = all_results([closed, new, in_slabs(*everything(new))], x, w)
    for variant in variants:
        assert_close(variant, plain, rtol=1e-4, atol=1e-4)
