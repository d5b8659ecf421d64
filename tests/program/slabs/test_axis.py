"""An axis through a program: what is on it, by how many rows, and what may not be."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.planning.graph import ALIGNED, Rows
from memplan.planning.slabs.slabs import AlongOp
from memplan.program.flat import Flat, flatten
from memplan.program.slabs.axis import slab_axis
from memplan.program.slabs.bands import with_bands

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def followed(function: Callable[..., Any], *args: Any, dim: int = 0) -> tuple[Any, Any, list[str]]:
    closed = flatten(jax.make_jaxpr(function)(*args))
    axis = slab_axis(Flat(closed), closed.jaxpr.invars[0], dim)
    return (
        closed,
        axis,
        [closed.jaxpr.eqns[number].primitive.name for number in sorted(axis.equations)],
    )


def test_a_resized_image_is_on_the_axis_with_the_weights_of_its_rows() -> None:
    closed = with_bands(
        Flat(flatten(jax.make_jaxpr(lambda x: jax.image.resize(x, (24, 8), "linear").T)(X)))
    ).closed
    axis = slab_axis(Flat(closed), closed.jaxpr.invars[0], 0)
    (weights,) = closed.jaxpr.constvars
    (wide,) = closed.jaxpr.outvars
    assert (axis.dims[wide], axis.scales[wide]) == (1, 3) and not axis.blocked
    assert (axis.dims[weights], axis.scales[weights]) == (0, 3)


def test_rows_by_rows_of_where_the_axis_begins() -> None:
    """Pooled, a row is two; reshaped and repeated, half a one."""

    def function(x: Any) -> Any:
        pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
        wide = jnp.broadcast_to(x[:, None], (8, 2, 8)).reshape(16, 8)
        return pooled, jnp.swapaxes(wide, 0, 1), x.sum(0)

    closed, axis, _ = followed(function, X)
    pooled, wide, total = closed.jaxpr.outvars
    assert (axis.dims[pooled], axis.scales[pooled]) == (0, Fraction(1, 2))
    assert (axis.dims[wide], axis.scales[wide]) == (1, 2)
    assert total not in axis.dims and not axis.blocked
    assert [along.reduces for _, along in sorted(axis.equations.items())].count(True) == 1


def dropped(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0)


CONFLICTS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "by rows and by columns": (lambda x: x + x.T, {"add"}),
    "drawn by number in the whole": (dropped, {"random_bits"}),
    # the sum lies as the sine does
    "two dimensions": (lambda x: jnp.sin(x) + jnp.cos(x).T, {"transpose"}),
    "two scales": (lambda x: x[:4] + x[::2], {"add"}),
    "a product of rows with rows": (lambda x: x @ x.T, set()),  # the second operand is read whole
    "rows in a row": (lambda x: x.reshape(64) * 2, set()),
    "no rule": (lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False), {"cholesky"}),
    "from the last row on": (lambda x: jax.lax.cumsum(jnp.cumsum(x, 0), reverse=True), {"cumsum"}),
    "along the dimension": (lambda x: jnp.sort(x, 0), {"sort"}),
    "backwards": (lambda x: x[::-1], {"rev"}),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_an_array_is_met_along_one_dimension_with_one_scale(name: str) -> None:
    function, blocked = CONFLICTS[name]
    closed, axis, names = followed(function, X)
    assert {closed.jaxpr.eqns[number].primitive.name for number in axis.blocked} == blocked
    assert not axis.blocked & axis.equations.keys()
    assert name != "by rows and by columns" or "transpose" in names
    assert function is not dropped or "select_n" in names


def test_the_largest_arrays_are_followed_first() -> None:
    """A small array that could lie either way lies as the large one has it."""

    def function(x: Any, w: Any) -> Any:
        large = jnp.broadcast_to(x[:, :, None], (8, 8, 32)) * w
        return x + x.T, large.sum(2).T + jnp.sin(x)

    closed, axis, names = followed(function, X, jax.ShapeDtypeStruct((8, 8, 32), jnp.float32))
    assert axis.dims[closed.jaxpr.invars[1]] == 0 and "reduce_sum" in names
    assert [closed.jaxpr.eqns[number].primitive.name for number in sorted(axis.blocked)] == [
        "add",
        "transpose",
    ]


def test_what_has_effects_is_on_no_axis() -> None:
    def function(x: Any) -> Any:
        jax.debug.callback(lambda y: None, x)
        return x + 1

    closed, axis, names = followed(function, X)
    assert names == ["add"] and {
        closed.jaxpr.eqns[number].primitive.name for number in axis.blocked
    } == {"debug_callback"}


def test_a_planner_gets_values_and_ops_by_number() -> None:
    """A stride of two from the second row on; the sum counts by the rows that it adds up."""
    _, axis, _ = followed(lambda x: jnp.sin(x)[1:7:2].sum(0), X)
    graph = axis.graph
    sine, cut, total = (op.outputs[0] for op in graph.graph.ops)
    assert graph.outputs == {total}
    assert graph.sizes == {0: 8, sine: 8, cut: 3} and graph.scales == {
        0: 1,
        sine: 1,
        cut: Fraction(1, 2),
    }
    assert graph.along == {
        0: AlongOp(((0, ALIGNED),), sine, False),
        1: AlongOp(((sine, Rows(2, 1, -1, 1)),), cut, False),
        2: AlongOp(((cut, ALIGNED),), cut, True),
    }
