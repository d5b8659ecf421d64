"""Flax Linen: a module, and a `TrainState` that holds parameters and optimizer state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import memplan


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(nn.Dense(32)(x))
        return jnp.tanh(nn.Dense(1)(x))


network, optimizer = Network(), optax.sgd(0.05, momentum=0.9)


def start():
    weights, data = jax.random.split(jax.random.key(0))
    x = jax.random.normal(data, (4096, 2))
    params = network.init(weights, x)["params"]
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
    return state, {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


@memplan.jit(budget="1700KiB", donate_argnums=0)  # was: @jax.jit(donate_argnums=0)
def train_step(state, batch):
    def loss_of(params):
        return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


state, batch = start()
losses = []
for _ in range(5):
    state, loss = train_step(state, batch)
    losses.append(float(loss))
