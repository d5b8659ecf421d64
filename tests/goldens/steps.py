"""Small training steps that together meet everything that planning and rewriting treat apart.

Their modules are stored with line numbers: losses that are added go to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Loss = Callable[..., jax.Array]
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
BOTH = ("data", "model")
CHANNELS_LAST = {2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
WIDTH, ROWS = 256, 4096


@dataclass(frozen=True)
class Step:
    """A step of training, its arguments, and how it is compiled.

    Attributes:
      shardings: of the arguments and of the results, over `MESH`; None on one device.
      pins: where named values are.
      in_slabs: the module is that of the step in slabs.
    """

    loss: Loss
    weights: Any
    inputs: tuple[Any, ...]
    donated: bool = True
    shardings: tuple[Any, Any] | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    in_slabs: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """Descent with momentum."""

        def step(state: Any, *inputs: Any) -> Any:
            weights, momentum = state
            value, gradients = jax.value_and_grad(self.loss)(weights, *inputs)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
            weights = jax.tree.map(lambda w, m: w - 0.1 * m.astype(w.dtype), weights, momentum)
            return (weights, momentum), value

        return step

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.weights, self.weights), *self.inputs

    @property
    def options(self) -> dict[str, Any]:
        """Of `jax.jit`."""
        donated = {"donate_argnums": (0,)} if self.donated else {}
        if self.shardings is None:
            return donated
        weights, inputs = self.shardings
        state = (weights, weights)
        results = (state, NamedSharding(MESH, P()))
        return {**donated, "in_shardings": (state, *inputs), "out_shardings": results}


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.nn.gelu(x @ weight)
        x = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-5)
    return (x**2).mean()


def pinned(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for number, weight in enumerate(weights):
        x = checkpoint_name(x @ weight, f"product_{number % 2}")
        x = jnp.tanh(x) + jnp.sin(x)
    return (x**2).mean()


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + jnp.sin(x), None), x, weights)
    return (x**2).mean()


def normalized(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    space = x.ndim - 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,) * space, "SAME", dimension_numbers=CHANNELS_LAST[space]
    )


def convolutional(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in weights:
        x = jax.nn.relu(normalized(convolved(x, kernel), (0, 1, 2)))
    return (x.mean((1, 2)) ** 2).mean()


def pooled(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in weights:
        x = jax.nn.relu(convolved(x, kernel))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (x**2).mean()


def u_net(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    axes = tuple(range(1, x.ndim - 1))
    first = jax.nn.relu(normalized(convolved(x, weights["first"]), axes))
    down = jax.nn.relu(normalized(convolved(first, weights["down"], 2), axes))
    deep = jax.nn.relu(normalized(convolved(down, weights["deep"]), axes))
    shape = (*first.shape[:-1], deep.shape[-1])
    up = jax.image.resize(deep, shape, "nearest")
    joined = jnp.concatenate([first, up], -1)
    last = jax.nn.relu(normalized(convolved(joined, weights["up"]), axes))
    return (convolved(last, weights["head"]) ** 2).mean()


def u_net_weights(space: int, channels: int) -> Mapping[str, Any]:
    window = (3,) * space
    return {
        "first": array(*window, 1, channels),
        "down": array(*window, channels, 2 * channels),
        "deep": array(*window, 2 * channels, 2 * channels),
        "up": array(*window, 3 * channels, channels),
        "head": array(*(1,) * space, channels, 2),
    }


def attention(x: jax.Array, weights: Any) -> jax.Array:
    """Two heads, each position sees those before it."""
    rows, length, width = x.shape
    q, k, v = jnp.moveaxis((x @ weights["qkv"]).reshape(rows, length, 3, 2, -1), 2, 0)
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) / width**0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("rhqk,rkhd->rqhd", shares, v).reshape(x.shape) @ weights["out"]


def block(x: jax.Array, weights: Any) -> jax.Array:
    x = x + attention(normalized(x, (2,)), weights)
    return x + jax.nn.gelu(normalized(x, (2,)) @ weights["wide"]) @ weights["narrow"]


def block_weights(*stacked: int, dtype: Any = jnp.float32) -> Mapping[str, Any]:
    sizes = {"qkv": (128, 384), "out": (128, 128), "wide": (128, 512), "narrow": (512, 128)}
    return {name: array(*stacked, *size, dtype=dtype) for name, size in sizes.items()}


def decoder_scanned(weights: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, weights)
    return (x.astype(jnp.float32) ** 2).mean()


def decoder(weights: list[Any], x: jax.Array) -> jax.Array:
    for layer in weights:
        x = block(x, layer)
    return (x.astype(jnp.float32) ** 2).mean()


def decoder_dropout(weights: list[Any], x: jax.Array, key: jax.Array) -> jax.Array:
    for number, layer in enumerate(weights):
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
        x = jnp.where(kept, block(x, layer) / 0.9, 0)
    return (x**2).mean()


def branching(weights: list[jax.Array], x: jax.Array, choice: jax.Array) -> jax.Array:
    first, *tail = weights
    x = jax.lax.cond(choice > 1, lambda x: jnp.sin(x) @ first, lambda x: x @ first.T, x)
    for weight in tail:
        x = jnp.tanh(x @ weight)
    branches = [jnp.sin, jnp.tanh, lambda x: jnp.sin(x) * jnp.cos(x)]
    return (jax.lax.switch(choice, branches, x) ** 2).mean()


def looping(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    def settled(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[1] < 5

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(carry[0]) * 0.9, carry[1] + 1

    for weight in weights:
        hidden = jnp.tanh(x @ weight)
        start = jax.lax.stop_gradient(hidden), jnp.int32(0)
        x = hidden + jax.lax.while_loop(settled, body, start)[0]
        x = jax.lax.fori_loop(0, 3, lambda trip, x: x + jnp.cos(x), x)
    return (x**2).mean()


@jax.custom_vjp
def swish(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def swish_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return swish(x), x


def swish_backward(x: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    share = jax.nn.sigmoid(x)
    return (slope * (share + x * share * (1 - share)),)


swish.defvjp(swish_forward, swish_backward)


def by_custom_rule(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = swish(x @ weight)
    return (x**2).mean()


def embedding(weights: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
    x = weights["table"][tokens]
    for weight in weights["layers"]:
        x = jnp.tanh(x @ weight)
    logits = jax.nn.log_softmax(x @ weights["table"].T)
    return -jnp.take_along_axis(logits, tokens[:, None], 1).mean()


def by_fft(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(weight), n=x.shape[1]))
    return (x**2).mean()


def by_cholesky(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        root = jnp.linalg.cholesky(weight @ weight.T + jnp.eye(weight.shape[0]))
        x = jnp.tanh(x @ root)
    return (x**2).mean()


def filled(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Large fills and updates of slices, and values that several readers may compute again."""
    total = jnp.zeros((2 * x.shape[0], x.shape[1]))
    for number, weight in enumerate(weights):
        x = jnp.tanh(x @ weight)
        total = jax.lax.dynamic_update_slice(total, jnp.sin(x), (number * 16, 0))
        total = total * jnp.concatenate([x, x]) + jnp.where(x > 0, 1.0, 0.0).sum()
    return (total**2).mean()


def pinned_scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        product = checkpoint_name(x @ weight, "product")
        return jnp.tanh(product) + jnp.sin(product), None

    return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()


def over(*names: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*names))


SQUARE = array(WIDTH, WIDTH)
BATCH = array(ROWS, WIDTH)
TOKENS = array(32, 256, 128)
STEPS: Mapping[str, Step] = {
    "mlp": Step(dense, [SQUARE] * 4, (BATCH,)),
    "mlp-undonated": Step(dense, [SQUARE] * 3, (BATCH,), donated=False),
    "mlp-bfloat16": Step(
        dense,
        [array(WIDTH, WIDTH, dtype=jnp.bfloat16)] * 4,
        (array(ROWS, WIDTH, dtype=jnp.bfloat16),),
    ),
    "pinned": Step(
        pinned, [SQUARE] * 5, (BATCH,), pins={"product_0": "host", "product_1": "device"}
    ),
    "pinned-recompute": Step(pinned, [SQUARE] * 4, (BATCH,), pins={"product_1": "recompute"}),
    "pinned-scanned": Step(
        pinned_scanned, array(6, WIDTH, WIDTH), (BATCH,), pins={"product": "host"}
    ),
    "conv-net": Step(
        convolutional,
        [array(3, 3, 3, 32), *[array(3, 3, 32, 32)] * 2],
        (array(8, 64, 64, 3),),
    ),
    "pooling": Step(pooled, [array(3, 3, 16, 16)] * 2, (array(8, 64, 64, 16),)),
    "u-net-2d": Step(u_net, u_net_weights(2, 16), (array(4, 64, 64, 1),)),
    "u-net-3d": Step(u_net, u_net_weights(3, 16), (array(2, 32, 32, 32, 1),)),
    "slabs": Step(u_net, u_net_weights(3, 16), (array(1, 64, 64, 64, 1),), in_slabs=True),
    "scanned": Step(scanned, array(6, WIDTH, WIDTH), (BATCH,)),
    "decoder": Step(decoder, [block_weights()] * 2, (TOKENS,)),
    "decoder-scanned": Step(decoder_scanned, block_weights(4), (TOKENS,)),
    "decoder-dropout": Step(
        decoder_dropout, [block_weights()] * 2, (TOKENS, array(2, dtype=jnp.uint32))
    ),
    "decoder-bfloat16": Step(
        decoder,
        [block_weights(dtype=jnp.bfloat16)] * 2,
        (array(32, 256, 128, dtype=jnp.bfloat16),),
    ),
    "branching": Step(branching, [SQUARE] * 4, (BATCH, array(dtype=jnp.int32))),
    "looping": Step(looping, [SQUARE] * 3, (BATCH,)),
    "custom-vjp": Step(by_custom_rule, [SQUARE] * 4, (BATCH,)),
    "embedding": Step(
        embedding,
        {"table": array(2048, WIDTH), "layers": [SQUARE] * 3},
        (array(ROWS, dtype=jnp.int32),),
    ),
    "fft": Step(by_fft, [array(WIDTH)] * 4, (BATCH,)),
    "cholesky": Step(by_cholesky, [array(128, 128)] * 3, (array(8192, 128),)),
    "filled": Step(filled, [SQUARE] * 4, (BATCH,)),
    "data-parallel": Step(
        dense,
        [array(1024, 1024)] * 4,
        (array(16384, 1024),),
        shardings=([over()] * 4, (over(BOTH),)),
    ),
    "fsdp": Step(
        dense,
        [array(1024, 1024)] * 4,
        (array(16384, 1024),),
        shardings=([over(BOTH)] * 4, (over(BOTH),)),
    ),
    "fsdp-scanned": Step(
        scanned,
        array(4, 1024, 1024),
        (array(16384, 1024),),
        shardings=(over(None, BOTH), (over(BOTH),)),
    ),
    "tensor-parallel": Step(
        dense,
        [array(1024, 1024)] * 4,
        (array(8192, 1024),),
        shardings=([over(None, "model"), over("model", None)] * 2, (over("data"),)),
    ),
}
"""By name, which is part of the names of stored files."""
