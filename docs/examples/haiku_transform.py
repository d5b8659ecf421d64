"""Haiku: a transformed network is a pair of functions of its parameters, so `memplan.jit` is all that it needs."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import memplan

network = hk.transform(lambda x: hk.nets.MLP((32, 32, 32, 32, 32, 1), activation=jnp.tanh)(x))
optimizer = optax.sgd(0.05, momentum=0.9)


def start():
    weights, data = jax.random.split(jax.random.key(0))
    x = jax.random.normal(data, (4096, 2))
    params = network.init(weights, x)
    return params, optimizer.init(params), {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(params, batch):
    return ((network.apply(params, None, batch["x"]) - batch["y"]) ** 2).mean()


@memplan.jit(budget="2000KiB", donate_argnums=(0, 1))  # was: @jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state, batch = start()
losses = []
for _ in range(5):
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
