"""Equinox: `memplan.equinox.filter_jit` in the place of `eqx.filter_jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import memplan

optimizer = optax.sgd(0.05, momentum=0.9)


def start():
    weights, data = jax.random.split(jax.random.key(0))
    model = eqx.nn.MLP(in_size=2, out_size=1, width_size=32, depth=4, activation=jnp.tanh, key=weights)
    x = jax.random.normal(data, (4096, 2))
    return model, optimizer.init(eqx.filter(model, eqx.is_array)), (x, jnp.sin(3 * x).sum(1, keepdims=True))


def loss_of(model, batch):
    x, y = batch
    return ((jax.vmap(model)(x) - y) ** 2).mean()


@memplan.equinox.filter_jit(budget="2MiB", donate="all-except-first")  # was: @eqx.filter_jit(donate="all-except-first")
def train_step(batch, model, opt_state):
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, batch)
    loss = eqx.error_if(loss, ~jnp.isfinite(loss), "the loss is not finite")
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


model, opt_state, batch = start()
losses = []
for _ in range(5):
    model, opt_state, loss = train_step(batch, model, opt_state)
    losses.append(float(loss))
