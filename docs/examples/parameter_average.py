"""Moving averages: one of the parameters, to evaluate with, and `optax.ema` of the gradients."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

import memplan

SIZES = (2, 32, 32, 32, 1)
optimizer = optax.chain(optax.ema(0.9), optax.sgd(0.05))


def start():
    *keys, data = jax.random.split(jax.random.key(0), len(SIZES))
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, pairwise(SIZES), strict=True)]
    average = jax.tree.map(jnp.copy, params)  # a buffer can be donated only once
    x = jax.random.normal(data, (4096, 2))
    return params, average, optimizer.init(params), {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel / kernel.shape[0] ** 0.5)
    return ((x - batch["y"]) ** 2).mean()


@memplan.jit(budget="1700KiB", donate_argnums=(0, 1, 2))  # was: @jax.jit(donate_argnums=(0, 1, 2))
def train_step(params, average, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    average = optax.incremental_update(params, average, step_size=0.01)
    return params, average, opt_state, loss


params, average, opt_state, batch = start()
losses = []
for _ in range(5):
    params, average, opt_state, loss = train_step(params, average, opt_state, batch)
    losses.append(float(loss))
