"""Steps whose operands XLA sends between devices, with and without a request of the user.

As a script, it plans them over eight CPU devices and prints their warnings as JSON.
"""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memplan
from tests.parallel.meshed_steps import AXES, LAST, ROWS, WIDTH, AnyMesh, Case, over, shaped
from tests.xla.steps import array

PARTS = 4
SHAPE = array(WIDTH, WIDTH), array(ROWS, WIDTH)


def descent(loss: Callable[..., jax.Array], weights: Any, *args: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, *args)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def divided(mesh: AnyMesh, loss: Callable[..., jax.Array]) -> Case:
    """The batch over all devices, the weight on each."""
    return Case(lambda w, x: descent(loss, w, x), SHAPE, (over(mesh), over(mesh, AXES)), {})


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=LAST, feature_group_count=4
    )


def in_groups(mesh: AnyMesh, convolve: Callable[..., jax.Array] = convolved) -> Case:
    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(convolve(jnp.tanh(x), kernel)) ** 2).mean()

    shapes = array(3, 3, 4, 16), array(16, 16, 16, 16)
    return Case(lambda w, x: descent(loss, w, x), shapes, (over(mesh), over(mesh, AXES)), {})


def in_groups_mapped(mesh: AnyMesh) -> Case:
    """Each device convolves its own rows."""
    rows = P(AXES)
    return in_groups(
        mesh, jax.shard_map(convolved, mesh=mesh, in_specs=(rows, P()), out_specs=rows)
    )


def summed_loss(w: jax.Array, parts: jax.Array) -> jax.Array:
    def add(total: jax.Array, part: jax.Array) -> Any:
        return total + (jnp.tanh(part @ w) ** 2).mean(), None

    return jax.lax.scan(add, jnp.zeros(()), parts)[0]


def microbatches(mesh: AnyMesh) -> Case:
    return divided(mesh, lambda w, x: summed_loss(w, x.reshape(PARTS, -1, WIDTH)))


def uneven_microbatches(mesh: AnyMesh) -> Case:
    """As many as do not divide among the devices."""
    case = divided(mesh, lambda w, x: summed_loss(w, x.reshape(3, -1, WIDTH)))
    return replace(case, shapes=(SHAPE[0], array(3 * ROWS, WIDTH)))


def microbatches_of_all(mesh: AnyMesh) -> Case:
    """Each has rows of every device."""
    return divided(mesh, lambda w, x: summed_loss(w, x.reshape(-1, PARTS, WIDTH).swapaxes(0, 1)))


def ranked(y: jax.Array) -> jax.Array:
    return (jnp.sort(y, axis=0) * jnp.arange(y.shape[0])[:, None]).mean()


def exchanged(mesh: AnyMesh) -> Case:
    """A sort of many columns: XLA divides those instead."""
    return divided(mesh, lambda w, x: ranked(x @ w))


def gathered(mesh: AnyMesh) -> Case:
    """A sort of one column."""
    return divided(mesh, lambda w, x: ranked((x @ w).sum(axis=1, keepdims=True)))


def asked_by_constraint(mesh: AnyMesh) -> Case:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.with_sharding_constraint(x @ w, over(mesh, AXES))
        return ranked(jax.lax.with_sharding_constraint(y, over(mesh)))

    return divided(mesh, loss)


def asked_by_hand(mesh: AnyMesh) -> Case:
    def own(y: jax.Array) -> jax.Array:
        return ranked(jax.lax.all_gather(y, AXES, tiled=True))

    mapped = jax.shard_map(own, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=False)
    return Case(lambda w, x: (w, mapped(x @ w)), SHAPE, (over(mesh), over(mesh, AXES)), {})


def sequence_parallel(mesh: AnyMesh) -> Case:
    """Tokens divided between the products of a tensor-parallel block, by constraints."""

    def lies(y: jax.Array, *names: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(*names)))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            y = lies(x, "data", "model")
            y = lies(y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5), "data", None)
            x = x + lies(jnp.tanh(lies(y @ up, "data", None, "model")) @ down, "data", "model")
        return (x**2).mean()

    shapes = [(array(WIDTH, 256), array(256, WIDTH))] * 2, array(16, 32, WIDTH)
    split = over(mesh, None, "model"), over(mesh, "model")
    return Case(lambda w, x: descent(loss, w, x), shapes, ([split] * 2, over(mesh, "data")), {})


def layers(mesh: AnyMesh, *names: Any) -> Case:
    """FSDP of layers in one array, in a loop, read in bfloat16."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(y: jax.Array, weight: jax.Array) -> Any:
            return jnp.tanh(y @ weight.astype(y.dtype)), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), weights)
        return (y.astype(jnp.float32) ** 2).mean()

    shapes = array(8, WIDTH, WIDTH), SHAPE[1]
    return Case(
        lambda w, x: descent(loss, w, x), shapes, (over(mesh, *names), over(mesh, AXES)), {}
    )


def fsdp_within_layers(mesh: AnyMesh) -> Case:
    return layers(mesh, None, AXES)


def fsdp_by_layers(mesh: AnyMesh) -> Case:
    return layers(mesh, AXES)


def split_moments(mesh: AnyMesh) -> Case:
    """ZeRO: moments in parts, weights on every device."""

    def step(state: Any, x: jax.Array) -> Any:
        weights, moment = state
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(weights)
        moment = 0.9 * moment + gradient
        return (weights - 0.1 * moment, moment), value

    lies = over(mesh), over(mesh, AXES)
    shapes, results = ((SHAPE[0], SHAPE[0]), SHAPE[1]), (lies, over(mesh))
    return Case(step, shapes, (lies, over(mesh, AXES)), {"out_shardings": results})


SILENT: dict[str, Callable[[AnyMesh], Case]] = {
    make.__name__: make
    for make in (in_groups_mapped, microbatches_of_all, asked_by_constraint, asked_by_hand, sequence_parallel,
                 fsdp_within_layers, fsdp_by_layers, split_moments)
}  # fmt: skip
# The start of its source line, and its warning.
LOUD: dict[str, tuple[Callable[[AnyMesh], Case], str, str]] = {
    "in_groups": (
        in_groups,
        "    return jax.lax.conv_general_dilated",
        "a grouped convolution ({}): each device gathers float32[16,16,16,16], 256.0 KiB, of which its own piece is "
        "32.0 KiB. Try jax.shard_map around it",
    ),
    "microbatches": (
        microbatches,
        "    return jax.lax.scan(add",
        "a slice ({}): each device gathers float32[4,128,64], 128.0 KiB, of which its own piece is 32.0 KiB. Try "
        "x.reshape(batch // k, k, ...).swapaxes(0, 1)",
    ),
    "uneven_microbatches": (
        uneven_microbatches,
        "    return jax.lax.scan(add",
        "a slice ({}): each device gathers float32[3072,64], 768.0 KiB, of which its own piece is 96.0 KiB.",
    ),
    "exchanged": (
        exchanged,
        "    return (jnp.sort",
        "a sort ({}): each device exchanges 32.0 KiB with the others. Try jax.lax.with_sharding_constraint",
    ),
    "gathered": (
        gathered,
        "    return (jnp.sort",
        "a sort ({}): each device gathers float32[1024,1], 4.0 KiB, of which its own piece is 512 B.",
    ),
}


def warnings_of(case: Case, **options: Any) -> list[str]:
    """The warnings about a step when it is planned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memplan.jit(case.step, **case.options, **options).plan(*shaped(case))
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def main() -> None:
    # nothing runs
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    makers = {**{name: make for name, (make, _, _) in LOUD.items()}, **SILENT}
    print(json.dumps({name: warnings_of(make(mesh)) for name, make in makers.items()}))


if __name__ == "__main__":
    main()
