"""Flax NNX: `memplan.nnx.jit` in the place of `nnx.jit`; the step changes its modules in place."""

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
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.dropout(x)


def start():
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (4096, 2))
    return model, optimizer, {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


@memplan.nnx.jit(budget="1700KiB", donate_argnums=(0, 1))  # was: @nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, batch):
    def loss_of(model):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


model, optimizer, batch = start()
losses = []
for _ in range(5):
    loss = train_step(model, optimizer, batch)
    losses.append(float(loss))
