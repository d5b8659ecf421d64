"""The trips of loops that count, as jax lowers them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.xla.schema import ModuleMessage
from memplan.xla.trips import count_trips


def trips_of(step: Any, *shapes: tuple[int, ...]) -> list[int | None]:
    """Of every loop of a step, before XLA optimizes it."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = jax.jit(step).lower(*args).compiler_ir("hlo")
    message = ModuleMessage.FromString(module.as_serialized_hlo_module_proto())
    computations = {computation.id: computation for computation in message.computations}
    return [
        count_trips(op, {inner.id: inner for inner in body.instructions}, computations)
        for body in message.computations
        for op in body.instructions
        if op.opcode == "while"
    ]


@pytest.mark.parametrize("count", [2, 3, 17, 1000])
def test_of_scans(count: int) -> None:
    def step(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, x: (jnp.sin(carry @ x), None), jnp.eye(8), xs)[0]

    assert trips_of(step, (count, 8, 8)) == [count]


def test_of_nested_loops_and_of_their_gradients() -> None:
    def loss(xs: jax.Array) -> jax.Array:
        def outer(carry: jax.Array, x: jax.Array) -> Any:
            inner = jax.lax.fori_loop(3, 8, lambda i, y: jnp.sin(y @ x), carry)
            return inner, None

        return jax.lax.scan(outer, jnp.eye(8), xs)[0].sum()

    assert sorted(trips_of(loss, (4, 8, 8)), key=str) == [4, 5]
    assert set(trips_of(jax.grad(loss), (4, 8, 8))) == {4, 5}


def test_a_loop_that_ends_by_its_values_is_not_counted() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    assert trips_of(step, (8,)) == [None]
