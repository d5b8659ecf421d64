"""A training step of ring attention: keys and values travel round the devices in a scan inside of a `shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

HEADS, SIZE = 2, 8
DEVICES = 8


def ring_step(mesh: Mesh | AbstractMesh, check_vma: bool = True) -> Any:
    """The step `(weights, x) -> (weights, loss)` over the axis `d` of a mesh."""
    ring = [(device, (device + 1) % DEVICES) for device in range(DEVICES)]

    def attended(x: jax.Array, *weights: jax.Array) -> jax.Array:
        q, k, v = (jnp.moveaxis((x @ w).reshape(-1, HEADS, SIZE), 1, 0) for w in weights)

        def part(carry: Any, _: None) -> tuple[Any, None]:
            total, weight, k, v = carry
            shares = jnp.exp(jnp.tanh(q @ jnp.swapaxes(k, 1, 2)))
            total += shares @ v
            weight += shares.sum(-1, keepdims=True)
            return (total, weight, *lax.ppermute((k, v), "d", ring)), None

        start = 0 * q, 0 * q[..., :1], k, v
        (total, weight, *_), _ = lax.scan(part, start, length=DEVICES)
        return x + jnp.moveaxis(total / weight, 0, 1).reshape(x.shape)

    rows, whole = PartitionSpec("d"), PartitionSpec()
    layer = jax.shard_map(
        attended,
        mesh=mesh,
        in_specs=(rows, whole, whole, whole),
        out_specs=rows,
        check_vma=check_vma,
    )

    def step(weights: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda ws: jnp.square(layer(x, *ws)).mean())(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    return step


def ring_shapes(mesh: Mesh | AbstractMesh, tokens: int) -> tuple[list[Any], Any]:
    """The step's arguments: weights that every device has whole, and tokens in equal parts."""

    def shape(spec: PartitionSpec, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))

    width = HEADS * SIZE
    weights = [shape(PartitionSpec(), width, width) for _ in range(3)]
    return weights, shape(PartitionSpec("d"), tokens, width)


def scores_nbytes(tokens: int) -> int:
    """Bytes of the scores that a device computes in one step of the ring."""
    return 4 * HEADS * (tokens // DEVICES) ** 2
