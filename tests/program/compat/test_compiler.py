"""Lowered modules under another name and with inputs on the host; XLA's texts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache
from jax._src.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from memplan.program import compat


def lowered() -> Any:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + jnp.sin(y)

    return jax.jit(step).lower(jnp.ones(3), jnp.ones(3))


def test_a_renamed_module_is_another_one() -> None:
    before = lowered()
    after = compat.rename_module(before, "mine")
    assert (compat.module_name_of(before), compat.module_name_of(after)) == ("jit_step", "mine")
    assert after.as_text().replace("@mine", "@jit_step") == before.as_text()
    np.testing.assert_allclose(after.compile()(jnp.ones(3), jnp.zeros(3)), 1)


def test_inputs_are_marked_as_on_the_host() -> None:
    before = lowered()
    assert compat.mark_on_host(before, ()) is before
    module = compat.mark_on_host(before, {1})
    (main,) = (line for line in module.as_text().splitlines() if "@main" in line)
    first, second = main.split("%arg1")
    assert "pinned_host" not in first and 'mhlo.memory_kind = "pinned_host"' in second
    assert "pinned_host" not in before.as_text()
    (_, sharding), _ = module.compile().input_shardings
    assert sharding.memory_kind == "pinned_host"


def test_outputs_on_the_host_are_where_the_module_puts_them() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    before = jax.jit(lambda x: (x, x + 1), out_shardings=device).lower(jnp.ones(3))
    after = compat.mark_on_host(before, {0}, {1})
    kinds = [sharding.memory_kind for sharding in after._lowering.compile_args["out_shardings"]]
    assert kinds[1] == "pinned_host" != kinds[0]
    free = compat.mark_on_host(lowered(), {0}, {0})._lowering.compile_args["out_shardings"]
    assert not hasattr(free[0], "memory_kind")  # jax asks XLA


def test_callbacks_are_lowered_for_a_platform_that_is_not_here() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda y: None, x)
        return x

    get_backend = mlir.ModuleContext.get_backend
    gpu = compat.AbsentDevice("cuda", "NVIDIA A100", 108, (8, 0))
    text = compat.lower_for(jax.jit(step).trace(jnp.ones(3)), gpu).as_text()
    assert "xla_ffi_python_gpu_callback" in text and mlir.ModuleContext.get_backend is get_backend
    no_gpu = replace(gpu, platform="no platform")
    with pytest.raises(NotImplementedError):
        compat.lower_for(jax.jit(jnp.linalg.eig).trace(jnp.ones((3, 3))), no_gpu)
    assert mlir.ModuleContext.get_backend is get_backend


def test_ordered_effects_beside_arrays_in_host_memory_are_lowered() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: None, ordered=True)
        host, device = jax.memory.Space.Host, jax.memory.Space.Device
        return jnp.sin(jax.device_put(jax.device_put(x, host), device))

    lower_function = mlir.lower_jaxpr_to_fun
    gpu = compat.AbsentDevice("cuda", "NVIDIA A100", 108, (8, 0))
    stage = jax.jit(step).trace(jnp.ones(3))
    for lowered in (compat.lower_for(stage, gpu), compat.lower_here(stage)):
        (main,) = (line for line in lowered.as_text().splitlines() if "@main" in line)
        assert main.count("!stablehlo.token") == 2  # taken and returned
    assert mlir.lower_jaxpr_to_fun is lower_function


def test_inputs_that_jax_drops_are_counted() -> None:
    def step(tokens: Any, unread: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: None, ordered=True)
        return x + y + tokens

    module = compat.mark_on_host(jax.jit(step).lower(*[jnp.ones(3)] * 4), {1, 2})
    (main,) = (line for line in module.as_text().splitlines() if "@main" in line)
    arguments = main.split("%arg")[1:]
    on_host = [number for number, text in enumerate(arguments) if "pinned_host" in text]
    assert on_host == [2]  # of the token and three arguments
    shardings = module._lowering.compile_args["in_shardings"]
    kinds = [getattr(sharding, "memory_kind", None) for sharding in shardings]
    assert kinds == [None, "pinned_host", None]


def test_large_constants_are_printed_whole() -> None:
    numbers = " ".join(map(str, range(100))).replace(" ", ", ")
    text = f"HloModule m\n\nENTRY e {{\n  ROOT c = s32[100]{{0}} constant({{{numbers}}})\n}}\n"
    assert numbers in compat.module_text(compat.module_proto(text))


def test_the_cache_on_disk_is_left_as_it_was() -> None:
    before = compilation_cache._cache_checked, compilation_cache._cache_used
    with compat.without_compilation_cache():
        assert (compilation_cache._cache_checked, compilation_cache._cache_used) == (True, False)
    assert (compilation_cache._cache_checked, compilation_cache._cache_used) == before


def test_the_cache_on_disk_is_left_as_it_was_by_threads() -> None:
    """One begins before and ends before the other does."""
    before = compilation_cache._cache_checked, compilation_cache._cache_used
    first, second = compat.without_compilation_cache(), compat.without_compilation_cache()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (compilation_cache._cache_checked, compilation_cache._cache_used) == (True, False)
    second.__exit__(None, None, None)
    assert (compilation_cache._cache_checked, compilation_cache._cache_used) == before


def test_what_a_program_says_how_to_divide() -> None:
    """Not what jax says by itself of a mesh whose axes are XLA's to divide over."""
    mesh = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))

    def step(x: jax.Array) -> jax.Array:
        y = jax.lax.with_sharding_constraint(
            2 * x, NamedSharding(mesh, P(P.UNCONSTRAINED, ("a", "b")))
        )
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(y)

    x = jax.ShapeDtypeStruct((10, 16), jnp.float32)
    on_mesh = jax.ShapeDtypeStruct((10, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert compat.constrained_sizes(jax.make_jaxpr(step)(x)) == {10 * 16 // 8, 10 // 2 * 16}
    assert (
        compat.constrained_sizes(jax.jit(jax.grad(lambda x: (x**2).mean())).trace(on_mesh).jaxpr)
        == frozenset()
    )
