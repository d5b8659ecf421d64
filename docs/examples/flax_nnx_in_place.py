"""Flax NNX, changed in place: `nnx.split` before the planned step and `nnx.update` after it."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import memplan

SIZES = (2, 32, 32, 32, 1)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(SIZES)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def start():
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (4096, 2))
    graph, state = nnx.split((model, optimizer))
    return graph, state, {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


@memplan.jit(budget="1700KiB", donate_argnums=1)
def train_step(graph, state, batch):
    def loss_of(model):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    model, optimizer = nnx.merge(graph, state)
    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return graph, nnx.state((model, optimizer)), loss


graph, state, batch = start()
model, optimizer = nnx.merge(graph, state)
losses = []
for _ in range(5):
    graph, state = nnx.split((model, optimizer))
    _, state, loss = train_step(graph, state, batch)
    nnx.update((model, optimizer), state)
    losses.append(float(loss))
