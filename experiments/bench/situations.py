"""Steps of users' own threads, each as it is asked about and with `jax.checkpoint` by hand.

Each is written from what the thread describes, with its sizes where it names them. What a step
computes besides is as small as it can be. `by_hand` puts `jax.checkpoint` where the answers do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Situation = tuple[Callable[..., Any], Sequence[Any], tuple[int, ...]]
"""A step, the shapes of its arguments, and the donated ones."""

_DEVICES = 8
_MESH = AbstractMesh((_DEVICES,), ("d",), axis_types=(AxisType.Auto,))


def _shape(*sides: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, dtype)


def _over(spec: PartitionSpec, *sides: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, jnp.float32, sharding=NamedSharding(_MESH, spec))


def _maybe(by_hand: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(function, prevent_cse=False) if by_hand else function


def trained(loss: Callable[..., Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(weights: Any, *batch: Any) -> tuple[Any, Array]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    return step


def ring_attention(by_hand: bool) -> Situation:
    """Attention over 64k tokens on 8 devices: keys and values travel round the ring."""
    heads, size = 2, 64
    ring = [(device, (device + 1) % _DEVICES) for device in range(_DEVICES)]

    def attended(x: Array, wq: Array, wk: Array, wv: Array) -> Array:
        q, k, v = (jnp.moveaxis((x @ w).reshape(-1, heads, size), 1, 0) for w in (wq, wk, wv))

        def part(carry: Any, _: None) -> tuple[Any, None]:
            total, weight, top, k, v = carry
            scores = q @ jnp.swapaxes(k, 1, 2) / size**0.5
            higher = jnp.maximum(top, scores.max(-1, keepdims=True))
            shares = jnp.exp(scores - higher)
            scale = jnp.exp(top - higher)
            total, weight = (
                total * scale + shares @ v,
                weight * scale + shares.sum(-1, keepdims=True),
            )
            return (total, weight, higher, *lax.ppermute((k, v), "d", ring)), None

        zeros = 0 * q
        start = zeros, zeros[..., :1], zeros[..., :1] - 1e30, k, v
        (total, weight, *_), _ = lax.scan(_maybe(by_hand, part), start, None, length=_DEVICES)
        return x + jnp.moveaxis(total / weight, 0, 1).reshape(x.shape)

    rows, all_of = PartitionSpec("d"), PartitionSpec()
    layer = jax.shard_map(
        attended, mesh=_MESH, in_specs=(rows, all_of, all_of, all_of), out_specs=rows
    )
    wide = heads * size
    weights = tuple(_over(all_of, wide, wide) for _ in range(3))
    step = trained(lambda weights, x: jnp.square(layer(x, *weights)).mean())
    return step, (weights, _over(rows, 65536, wide)), (0,)


def pipeline(by_hand: bool) -> Situation:
    """A pipeline of 8 stages by `ppermute`, over 16 microbatches."""
    batches, rows, wide = 16, 1024, 1024

    def stage(weights: Array, x: Array) -> Array:
        for weight in weights:
            x = x + jnp.tanh(x @ weight)
        return x

    def piped(weights: Array, x: Array) -> Array:
        device = lax.axis_index("d")
        onward = [(number, number + 1) for number in range(_DEVICES - 1)]

        def tick(state: Array, number: Array) -> tuple[Array, Array]:
            entering = x[jnp.minimum(number, batches - 1)]
            result = _maybe(by_hand, stage)(weights[0], jnp.where(device == 0, entering, state))
            return lax.ppermute(result, "d", onward), result

        start = lax.pcast(jnp.zeros((rows, wide)), "d", to="varying")
        _, results = lax.scan(tick, start, jnp.arange(batches + _DEVICES - 1))
        return jnp.where(device == _DEVICES - 1, results[_DEVICES - 1 :], 0)[None]

    by_stage, all_of = PartitionSpec("d"), PartitionSpec()
    run = jax.shard_map(piped, mesh=_MESH, in_specs=(by_stage, all_of), out_specs=by_stage)
    weights = _over(by_stage, _DEVICES, 4, wide, wide)
    step = trained(lambda weights, x: jnp.square(run(weights, x)).mean())
    return step, (weights, _over(all_of, batches, rows, wide)), (0,)


def message_passing(by_hand: bool) -> Situation:
    """GraphCast's processor: 16 rounds of messages over the edges of a mesh, scanned."""
    nodes, edges, wide, rounds = 10242, 81900, 256, 16
    senders, receivers = np.random.default_rng(0).integers(nodes, size=(2, edges), dtype=np.int32)

    def block(state: tuple[Array, Array], weights: Any) -> tuple[Any, None]:
        h, e, (a, b, c, d) = *state, weights
        joined = jnp.concatenate([e, h[senders], h[receivers]], 1)
        e = e + jax.nn.silu(joined @ a) @ b
        heard = jax.ops.segment_sum(e, receivers, nodes)
        return (h + jax.nn.silu(jnp.concatenate([h, heard], 1) @ c) @ d, e), None

    def loss(weights: Any, h: Array, e: Array) -> Array:
        (h, _), _ = lax.scan(_maybe(by_hand, block), (h, e), weights)
        return jnp.square(h).mean()

    sides = ((3 * wide, wide), (wide, wide), (2 * wide, wide), (wide, wide))
    weights = tuple(_shape(rounds, *pair) for pair in sides)
    return trained(loss), (weights, _shape(nodes, wide), _shape(edges, wide)), (0,)


def pair_stack(by_hand: bool) -> Situation:
    """Evoformer's pair stack: triangle products, triangle attention and a transition, 8 blocks."""
    residues, wide, heads, blocks = 192, 64, 4, 8

    def normal(z: Array) -> Array:
        return (z - z.mean(-1, keepdims=True)) * lax.rsqrt(z.var(-1, keepdims=True) + 1e-5)

    def block(z: Array, weights: Any) -> tuple[Array, None]:
        left, right, gate, out, qkv, attended, wider, narrower = weights
        for form in ("ikc,jkc->ijc", "kic,kjc->ijc"):
            n = normal(z)
            product = jnp.einsum(form, jax.nn.sigmoid(n @ gate) * (n @ left), n @ right)
            z = z + normal(product) @ out
        for turned in (False, True):
            n = normal(jnp.swapaxes(z, 0, 1) if turned else z)
            q, k, v = jnp.split((n @ qkv).reshape(residues, residues, heads, -1), 3, -1)
            scores = jax.nn.softmax(jnp.einsum("rihc,rjhc->rhij", q, k) / (wide / heads) ** 0.5)
            mixed = jnp.einsum("rhij,rjhc->rihc", scores, v).reshape(z.shape) @ attended
            z = z + (jnp.swapaxes(mixed, 0, 1) if turned else mixed)
        return z + jax.nn.relu(normal(z) @ wider) @ narrower, None

    def loss(weights: Any, z: Array) -> Array:
        return jnp.square(lax.scan(_maybe(by_hand, block), z, weights)[0]).mean()

    square = (wide, wide)
    sides = (*[square] * 4, (wide, 3 * wide), square, (wide, 4 * wide), (4 * wide, wide))
    weights = tuple(_shape(blocks, *pair) for pair in sides)
    return trained(loss), (weights, _shape(residues, residues, wide)), (0,)


def rollout(by_hand: bool) -> Situation:
    """GenCast's rollout: 4 steps of a forecast, each through a scan of 6 layers."""
    points, wide, layers, steps = 16384, 256, 6, 4

    def layer(x: Array, weights: Any) -> tuple[Array, None]:
        a, b = weights
        return x + jax.nn.silu(x @ a) @ b, None

    def forecast(weights: Any, x: Array) -> Array:
        return lax.scan(layer, x, weights)[0]

    def loss(weights: Any, x: Array, truth: Array) -> Array:
        def step(x: Array, target: Array) -> tuple[Array, Array]:
            x = _maybe(by_hand, forecast)(weights, x)
            return x, jnp.square(x - target).mean()

        return lax.scan(step, x, truth)[1].mean()

    weights = _shape(layers, wide, 4 * wide), _shape(layers, 4 * wide, wide)
    return trained(loss), (weights, _shape(points, wide), _shape(steps, points, wide)), (0,)


def soap(by_hand: bool) -> Situation:
    """SOAP: Adam in the eigenbasis of each layer's gradients, renewed by `eigh`; scanned layers."""
    layers, wide, rows = 8, 1024, 16384

    def layer(x: Array, weight: Array) -> tuple[Array, None]:
        return x + jnp.tanh(x @ weight), None

    def loss(weights: Array, x: Array) -> Array:
        return jnp.square(lax.scan(_maybe(by_hand, layer), x, weights)[0]).mean()

    def step(state: Any, x: Array) -> tuple[Any, Array]:
        weights, factor, basis, moment, count = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        factor = 0.95 * factor + 0.05 * gradients @ jnp.swapaxes(gradients, 1, 2)
        basis = lax.cond(count % 10 == 0, lambda: jnp.linalg.eigh(factor)[1], lambda: basis)
        turned = jnp.swapaxes(basis, 1, 2) @ gradients
        moment = 0.99 * moment + 0.01 * jnp.square(turned)
        weights = weights - 1e-3 * basis @ (turned * lax.rsqrt(moment + 1e-8))
        return (weights, factor, basis, moment, count + 1), value

    stack = _shape(layers, wide, wide)
    state = (stack, stack, stack, stack, _shape(dtype=jnp.int32))
    return step, (state, _shape(rows, wide)), (0,)


def rnn_transducer(by_hand: bool) -> Situation:
    """RNN-T's joint network: logits for every pair of frame and token, by blocks of frames."""
    batch, frames, tokens, wide, words, block = 8, 256, 64, 512, 1024, 16

    def joint(weights: Any, heard: Array, written: Array) -> Array:
        mixed = jnp.tanh(heard[:, :, None] + written[:, None])
        logits = jax.nn.log_softmax(mixed @ weights)
        return logits[..., :2]  # blank, and the token at hand

    def loss(weights: Any, heard: Array, written: Array) -> Array:
        pieces = jnp.moveaxis(heard.reshape(batch, -1, block, wide), 1, 0)
        part = _maybe(by_hand, partial(joint, weights, written=written))
        blank, token = jnp.moveaxis(lax.map(lambda piece: part(piece), pieces), -1, 0)
        blank, token = (x.swapaxes(0, 1).reshape(batch, frames, tokens) for x in (blank, token))

        def frame(alpha: Array, steps: tuple[Array, Array]) -> tuple[Array, None]:
            stay, move = steps
            moved = jnp.pad(alpha + move, ((0, 0), (1, 0)), constant_values=-1e30)[:, :-1]
            return jnp.logaddexp(alpha + stay, moved), None

        start = jnp.full((batch, tokens), -1e30).at[:, 0].set(0)
        alpha, _ = lax.scan(frame, start, (blank.swapaxes(0, 1), token.swapaxes(0, 1)))
        return -alpha[:, -1].mean()

    args = _shape(wide, words), _shape(batch, frames, wide), _shape(batch, tokens, wide)
    return trained(loss), args, (0,)


def pixels(by_hand: bool) -> Situation:
    """PPO on pixels: epochs of minibatches through a convolutional torso."""
    epochs, minibatches, size, actions = 2, 4, 1024, 6

    def torso(kernels: Any, x: Array) -> Array:
        for kernel, stride in zip(kernels, (4, 2, 1), strict=True):
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return x.reshape(x.shape[0], -1)

    def loss(weights: Any, images: Array, chosen: Array, gains: Array) -> Array:
        kernels, hidden, policy = weights
        x = _maybe(by_hand, torso)(kernels, images.astype(jnp.float32) / 255)
        logits = jax.nn.log_softmax(jax.nn.relu(x @ hidden) @ policy)
        taken = jnp.take_along_axis(logits, chosen[:, None], 1)[:, 0]
        return -jnp.minimum(
            jnp.exp(taken) * gains, jnp.clip(jnp.exp(taken), 0.8, 1.2) * gains
        ).mean()

    def step(weights: Any, *batch: Array) -> tuple[Any, Array]:
        pieces = jax.tree.map(lambda x: x.reshape(minibatches, size, *x.shape[1:]), batch)

        def epoch(weights: Any, _: None) -> tuple[Any, Array]:
            weights, losses = lax.scan(lambda w, piece: trained(loss)(w, *piece), weights, pieces)
            return weights, losses.mean()

        weights, losses = lax.scan(epoch, weights, None, length=epochs)
        return weights, losses.mean()

    kernels = _shape(8, 8, 4, 32), _shape(4, 4, 32, 64), _shape(3, 3, 64, 64)
    weights = kernels, _shape(7 * 7 * 64, 512), _shape(512, actions)
    rows = minibatches * size
    images = _shape(rows, 84, 84, 4, dtype=jnp.uint8)
    return step, (weights, images, _shape(rows, dtype=jnp.int32), _shape(rows)), (0,)


def chunked_cross_entropy(by_hand: bool) -> Situation:
    """Cross entropy over 64k words, by chunks of 1,024 tokens."""
    tokens, wide, words, chunk = 16384, 1024, 65536, 1024

    def part(head: Array, hidden: Array, labels: Array) -> Array:
        logits = jax.nn.log_softmax((hidden @ head).astype(jnp.float32))
        return -jnp.take_along_axis(logits, labels[:, None], 1).sum()

    def loss(weights: tuple[Array, Array], x: Array, labels: Array) -> Array:
        body, head = weights
        hidden = jnp.tanh(x @ body).reshape(-1, chunk, wide)

        def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
            return total + _maybe(by_hand, part)(head, *piece), None

        return lax.scan(add, jnp.float32(0), (hidden, labels.reshape(-1, chunk)))[0] / tokens

    weights = _shape(wide, wide), _shape(wide, words)
    return trained(loss), (weights, _shape(tokens, wide), _shape(tokens, dtype=jnp.int32)), (0,)


def state_space(by_hand: bool) -> Situation:
    """S5: layers of a diagonal state space by `associative_scan` over the sequence."""
    batch, length, wide, states, layers = 4, 4096, 128, 128, 4

    def run(decay: Array, inputs: Array) -> Array:
        def join(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
            return first[0] * second[0], second[0] * first[1] + second[1]

        decays = jnp.broadcast_to(decay, inputs.shape)
        return lax.associative_scan(join, (decays, inputs), axis=1)[1]

    def layer(x: Array, weights: Any) -> tuple[Array, None]:
        decay, into, out, gate = weights
        y = jax.nn.gelu(run(jax.nn.sigmoid(decay), x @ into) @ out)
        return x + y * jax.nn.sigmoid(y @ gate), None

    def loss(weights: Any, x: Array) -> Array:
        return jnp.square(lax.scan(_maybe(by_hand, layer), x, weights)[0]).mean()

    weights = (
        _shape(layers, states), _shape(layers, wide, states), _shape(layers, states, wide),
        _shape(layers, wide, wide),
    )  # fmt: skip
    return trained(loss), (weights, _shape(batch, length, wide)), (0,)


SITUATIONS: dict[str, tuple[Callable[[bool], Situation], str | None]] = {
    "ring_attention": (ring_attention, f"1x{_DEVICES}"),
    "pipeline": (pipeline, f"1x{_DEVICES}"),
    "message_passing": (message_passing, None),
    "pair_stack": (pair_stack, None),
    "rollout": (rollout, None),
    "soap": (soap, None),
    "rnn_transducer": (rnn_transducer, None),
    "pixels": (pixels, None),
    "chunked_cross_entropy": (chunked_cross_entropy, None),
    "state_space": (state_space, None),
}
"""The situations with the machine that each runs on; None: one device."""
