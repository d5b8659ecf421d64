"""Plain pytrees: parameters in lists and dicts, and the training step as a function of them."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

import memplan

SIZES = (2, 32, 32, 32, 1)
optimizer = optax.sgd(0.05, momentum=0.9)


def start():
    *keys, data = jax.random.split(jax.random.key(0), len(SIZES))
    params = [
        {"kernel": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}
        for key, (inputs, outputs) in zip(keys, pairwise(SIZES), strict=True)
    ]
    x = jax.random.normal(data, (4096, 2))
    return params, optimizer.init(params), {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return ((x - batch["y"]) ** 2).mean()


@memplan.jit(budget="1700KiB", donate_argnums=(0, 1), verify="numbers")  # was: @jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state, batch = start()
losses = []
for _ in range(5):
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
