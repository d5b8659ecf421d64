"""Values and traces: what jax knows of them, and the random bits of a part."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program import compat


def test_the_transform_around_a_value_is_named() -> None:
    transforms: list[str | None] = []

    def look(x: Any) -> Any:
        transforms.append(compat.transform_of([1.0, x]))
        return x * 1.0

    look(2.0)
    jax.grad(look)(2.0)
    jax.jvp(look, (2.0,), (1.0,))
    jax.vmap(look)(jnp.ones(2))
    jax.make_jaxpr(look)(2.0)
    assert transforms == [None, "grad", "grad", "vmap", None]


def test_it_traces_only_inside() -> None:
    inside: list[bool] = []
    jax.make_jaxpr(lambda x: (inside.append(compat.is_tracing()), x)[1])(1.0)
    assert inside == [True] and not compat.is_tracing()


def test_only_what_is_committed_elsewhere_than_usual_has_a_placement() -> None:
    mesh = jax.make_mesh((1,), ("d",))
    host = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    assert compat.placement_of(jnp.ones(2)) is None
    assert compat.placement_of(jax.device_put(jnp.ones(2), jax.devices()[0])) is None
    assert compat.placement_of(jax.ShapeDtypeStruct((2,), jnp.float32)) is None
    assert compat.placement_of(jax.ShapeDtypeStruct((2,), jnp.float32, sharding=host)) == host
    assert compat.placement_of(3.0) is None


def test_gradients_in_the_block_and_only_there_are_checkpointed() -> None:
    def primitives() -> set[str]:
        closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(jnp.sin(x))))(1.0)
        return {
            name
            for eqn in closed.jaxpr.eqns
            if (name := eqn.primitive.name) in ("checkpoint", "remat2", "remat")
        }

    assert not primitives()
    with compat.differentiated_as(jax.checkpoint):
        assert primitives()
    assert not primitives()


def test_keys_and_their_generators() -> None:
    key, rbg = jax.random.key(0), jax.random.key(0, impl="rbg")
    assert compat.is_key(key) and compat.is_key(jax.eval_shape(lambda: key))
    assert not compat.is_key(jax.random.PRNGKey(0)) and not compat.is_key(3)
    assert (compat.key_impl_of(key.dtype), compat.key_impl_of(rbg.dtype)) == ("threefry2x32", "rbg")


@pytest.mark.parametrize(
    ("impl", "alone"), [("threefry2x32", True), ("rbg", False), ("unsafe_rbg", False)]
)
def test_only_keys_of_threefry_draw_by_themselves(impl: str, alone: bool) -> None:
    closed = jax.make_jaxpr(lambda key, x: x)(jax.random.key(0, impl=impl), 1.0)
    assert [compat.draws_by_itself(var) for var in closed.jaxpr.invars] == [alone, True]
