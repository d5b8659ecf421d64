"""Steps of other fields: pairs of a protein's residues, a mesh around the Earth, gradients of every sample."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.situations import trained

Built = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and the shapes of its arguments."""

HEADS = 4
GRID = 721 * 1440  # a quarter of a degree


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale


# Pairs: a block of a Pairformer, as in AlphaFold 3 (Abramson et al., Nature 2024, supplement,
# algorithms 11 to 15): two triangle products, two triangle attentions, a transition.


def _triangle_product(weights: Any, pairs: jax.Array, equation: str) -> jax.Array:
    x = _normalized(pairs, weights["scale"])
    left = jax.nn.sigmoid(x @ weights["left_gate"]) * (x @ weights["left"])
    right = jax.nn.sigmoid(x @ weights["right_gate"]) * (x @ weights["right"])
    product = _normalized(jnp.einsum(equation, left, right), weights["product_scale"])
    return pairs + jax.nn.sigmoid(x @ weights["gate"]) * (product @ weights["out"])


def _triangle_attention(weights: Any, pairs: jax.Array) -> jax.Array:
    residues, _, channels = pairs.shape
    x = _normalized(pairs, weights["scale"])
    query, key, value = (
        (x @ weights[name]).reshape(residues, residues, HEADS, -1)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("ijhd,ikhd->hijk", query, key).astype(jnp.float32)
    bias = jnp.einsum("jkh->hjk", x @ weights["bias"])[:, None].astype(jnp.float32)
    shares = jax.nn.softmax(scores * (HEADS / channels) ** 0.5 + bias).astype(pairs.dtype)
    values = jnp.einsum("hijk,ikhd->ijhd", shares, value).reshape(pairs.shape)
    return pairs + (jax.nn.sigmoid(x @ weights["gate"]) * values) @ weights["out"]


def _pair_block(pairs: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    pairs = _triangle_product(weights["outgoing"], pairs, "ikc,jkc->ijc")
    pairs = _triangle_product(weights["incoming"], pairs, "kic,kjc->ijc")
    pairs = _triangle_attention(weights["start"], pairs)
    pairs = _triangle_attention(weights["end"], pairs.swapaxes(0, 1)).swapaxes(0, 1)
    x = _normalized(pairs, weights["scale"])
    return pairs + jax.nn.relu(x @ weights["into"]) @ weights["out"], None


def _pair_weights(blocks: int, channels: int) -> Any:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return _array(blocks, *shape, dtype=jnp.bfloat16)

    def squares(*names: str) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: array(channels, channels) for name in names} | {"scale": array(channels)}

    product = squares("left", "left_gate", "right", "right_gate", "gate", "out")
    product["product_scale"] = array(channels)
    attention = squares("query", "key", "value", "gate", "out") | {"bias": array(channels, HEADS)}
    return {
        "outgoing": product,
        "incoming": product,
        "start": attention,
        "end": attention,
        "scale": array(channels),
        "into": array(channels, 4 * channels),
        "out": array(4 * channels, channels),
    }


def pair_inference(residues: int, blocks: int, channels: int = 128) -> Built:
    """The pairs of a protein's residues behind all blocks, in bfloat16."""

    def step(pairs: jax.Array, weights: Any) -> jax.Array:
        return lax.scan(_pair_block, pairs, weights)[0]

    pairs = _array(residues, residues, channels, dtype=jnp.bfloat16)
    return step, (pairs, _pair_weights(blocks, channels))


def pair_training(residues: int, blocks: int, channels: int = 128) -> Built:
    """Trains the blocks, in bfloat16."""

    def loss(weights: Any, pairs: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(_pair_block, pairs, weights)[0] - target).mean()

    shape = residues, residues, channels
    pairs, target = _array(*shape, dtype=jnp.bfloat16), _array(*shape)
    return trained(loss), (_pair_weights(blocks, channels), pairs, target)


# A mesh around the Earth: sizes of GraphCast (Lam et al., Science 2023): 0.25 degrees, 227 outputs
# and 474 inputs of a grid point, 512 channels, 16 layers.


def _mlp(weights: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.swish(x @ weights["into"] + weights["shift"])
    return _normalized(hidden @ weights["out"], weights["scale"])


def _mlp_weights(inputs: int, channels: int, *layers: int) -> Any:
    return {
        "into": _array(*layers, inputs, channels),
        "shift": _array(*layers, channels),
        "out": _array(*layers, channels, channels),
        "scale": _array(*layers, channels),
    }


def _messages(
    weights: Any, edges: jax.Array, sent: jax.Array, received: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The messages along edges, and their receivers after these."""
    senders, receivers = ends
    read = [edges, sent[senders], received[receivers]]
    messages = _mlp(weights["edge"], jnp.concatenate(read, -1))
    sums = jax.ops.segment_sum(messages, receivers, len(received))
    return messages, received + _mlp(weights["node"], jnp.concatenate([received, sums], -1))


def weather_training(
    grid: int = GRID,
    mesh: int = 40_962,
    edges: int = 327_660,
    to_mesh: int = 1_618_746,
    to_grid: int = 3_114_720,
    channels: int = 512,
    layers: int = 16,
) -> Built:
    """Trains a graph network that reads a grid, passes messages on a mesh, and writes the grid."""

    def loss(weights: Any, graph: Any, state: jax.Array, target: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda array: array.astype(jnp.bfloat16), weights)
        features, ends = graph
        edge = {
            name: _mlp(weights[f"{name} edges"], feature.astype(jnp.bfloat16))
            for name, feature in features.items()
        }
        on_grid = _mlp(weights["grid"], state.astype(jnp.bfloat16))
        on_mesh = jnp.zeros((mesh, channels), jnp.bfloat16)
        _, on_mesh = _messages(weights["in"], edge["in"], on_grid, on_mesh, ends["in"])

        def layer(carry: Any, weights: Any) -> tuple[Any, None]:
            on_mesh, edges = carry
            messages, on_mesh = _messages(weights, edges, on_mesh, on_mesh, ends["mesh"])
            return (on_mesh, edges + messages), None

        (on_mesh, _), _ = lax.scan(layer, (on_mesh, edge["mesh"]), weights["layers"])
        _, on_grid = _messages(weights["out"], edge["out"], on_mesh, on_grid, ends["out"])
        return jnp.square(on_grid @ weights["head"] - target).mean()

    def pass_weights(*layers: int) -> Any:
        return {
            "edge": _mlp_weights(3 * channels, channels, *layers),
            "node": _mlp_weights(2 * channels, channels, *layers),
        }

    counts = {"in": to_mesh, "mesh": edges, "out": to_grid}
    weights = {
        "grid": _mlp_weights(474, channels),
        "in": pass_weights(),
        "layers": pass_weights(layers),
        "out": pass_weights(),
        "head": _array(channels, 227),
        **{f"{name} edges": _mlp_weights(4, channels) for name in counts},
    }
    features = {name: _array(count, 4) for name, count in counts.items()}
    ends = {name: _array(2, count, dtype=jnp.int32) for name, count in counts.items()}
    return trained(loss), (weights, (features, ends), _array(grid, 474), _array(grid, 227))


# Gradients of every sample, as for natural gradients.


def natural_gradient(samples: int = 4096, inputs: int = 64, width: int = 512) -> Built:
    """The product of the samples' Fisher matrix and a vector, from the gradient of every sample."""

    def network(weights: Any, sample: jax.Array) -> jax.Array:
        for weight in weights[:-1]:
            sample = jnp.tanh(sample @ weight)
        return (sample @ weights[-1])[0]

    def step(vector: Any, weights: Any, batch: jax.Array) -> Any:
        gradients = jax.vmap(jax.grad(network), (None, 0))(weights, batch)
        centred = [gradient - gradient.mean(0) for gradient in gradients]
        along = sum(
            jnp.einsum("nio,io->n", gradient, part)
            for gradient, part in zip(centred, vector, strict=True)
        )
        return [jnp.einsum("n,nio->io", along, gradient) / samples for gradient in centred]

    weights = [_array(inputs, width), _array(width, width), _array(width, 1)]
    return step, (weights, weights, _array(samples, inputs))
