"""Equinox: arrays are arguments of the planned step; other fields (activations, sizes) stay outside of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import memplan

optimizer = optax.sgd(0.05, momentum=0.9)


def network(key):
    return eqx.nn.MLP(in_size=2, out_size=1, width_size=32, depth=3, activation=jnp.tanh, key=key)


_, static = eqx.partition(network(jax.random.key(0)), eqx.is_array)


def start():
    weights, data = jax.random.split(jax.random.key(0))
    params = eqx.filter(network(weights), eqx.is_array)
    x = jax.random.normal(data, (4096, 2))
    return params, optimizer.init(params), {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(model, batch):
    return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean()


@memplan.jit(budget="1700KiB", donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    model = eqx.combine(params, static)
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss


params, opt_state, batch = start()
losses = []
for _ in range(5):
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
model = eqx.combine(params, static)
