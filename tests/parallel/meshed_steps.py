"""Training steps as users write them for a mesh of two axes, concrete or abstract."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.xla.steps import array

AXES = "data", "model"
LAST = "NHWC", "HWIO", "NHWC"  # channels
LAYERS, WIDTH, ROWS = 6, 64, 1024
AnyMesh = Mesh | AbstractMesh
ABSTRACT = AbstractMesh((2, 4), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


@dataclass(frozen=True)
class Case:
    """A step, the shapes and shardings of its arguments, and options of `jax.jit`."""

    step: Callable[..., Any]
    shapes: tuple[Any, ...]
    shardings: tuple[Any, ...]
    options: dict[str, Any]


def over(mesh: AnyMesh, *names: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*names))


def mlp(weights: Any, x: jax.Array, between: Callable[[jax.Array], jax.Array] = lambda y: y) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for weight in weights:
            y = between(jnp.sin(y @ weight))
        return (y**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


MLP = [array(WIDTH, WIDTH)] * LAYERS, array(ROWS, WIDTH)


def fsdp(mesh: AnyMesh) -> Case:
    """Every weight in parts on all devices, gathered where it is read."""
    return Case(mlp, MLP, ([over(mesh, AXES)] * LAYERS, over(mesh, AXES)), {})


def tensor(mesh: AnyMesh) -> Case:
    """Weights by columns and by rows in turn over one axis, the batch over the other."""
    split = [over(mesh, None, "model"), over(mesh, "model", None)] * (LAYERS // 2)
    return Case(mlp, MLP, (split, over(mesh, "data")), {})


def by_options(mesh: AnyMesh) -> Case:
    """The shardings in the options of jax.jit alone."""
    case = fsdp(mesh)
    results = ([over(mesh, AXES)] * LAYERS, over(mesh))
    options = {"in_shardings": case.shardings, "out_shardings": results}
    return Case(case.step, case.shapes, (None, None), options)


def constrained(mesh: AnyMesh) -> Case:
    """The batch divided in the middle of the step, by constraints alone."""

    def step(weights: Any, x: jax.Array) -> Any:
        def by_rows(y: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(y, over(mesh, AXES))

        return mlp(weights, by_rows(2 * x), by_rows)

    return Case(step, MLP, (None, None), {})


def mapped(mesh: AnyMesh) -> Case:
    """Sums written by hand, for devices of one axis inside of the step."""

    def normed(y: jax.Array) -> jax.Array:
        return y / jnp.sqrt(1 + jax.lax.pmean((y**2).mean(), AXES))

    def step(weights: Any, x: jax.Array) -> Any:
        return mlp(
            weights, x, jax.shard_map(normed, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
        )

    return Case(step, MLP, ([over(mesh)] * LAYERS, over(mesh, AXES)), {})


def in_space(mesh: AnyMesh) -> Case:
    """Convolutions over an image whose rows are divided: XLA exchanges the halos."""
    kernels, image = [array(3, 3, 8, 8)] * 4, array(2, 32, 16, 8)

    def step(kernels: Any, x: jax.Array) -> Any:
        def loss(kernels: Any) -> jax.Array:
            y = x
            for kernel in kernels:
                y = jax.lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=LAST)
                y = jnp.tanh(y)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(kernels)
        return [w - 0.1 * g for w, g in zip(kernels, gradients, strict=True)], value

    return Case(step, (kernels, image), ([over(mesh)] * 4, over(mesh, "data", "model")), {})


CASES: dict[str, Callable[[AnyMesh], Case]] = {
    make.__name__: make for make in (fsdp, tensor, by_options, constrained, mapped, in_space)
}


def explicit(mesh: AnyMesh) -> AnyMesh:
    """The same mesh, whose axes are part of arrays' types."""
    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def shaped(case: Case) -> Any:
    """The arguments as shapes with their shardings."""

    def with_sharding(shape: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return tuple(
        shapes if sharding is None else jax.tree.map(with_sharding, shapes, sharding)
        for shapes, sharding in zip(case.shapes, case.shardings, strict=True)
    )
