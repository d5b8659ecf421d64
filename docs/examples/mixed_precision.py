"""Mixed precision: float32 parameters, bfloat16 activations, and a loss scale that adapts itself.

The scale is halved when a gradient overflows, and that update is skipped; it is doubled after 200 good steps. bfloat16
seldom needs one; float16 does.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

import memplan

SIZES = (2, 32, 32, 32, 1)
optimizer = optax.apply_if_finite(optax.sgd(0.05, momentum=0.9), max_consecutive_errors=10)


def start():
    *keys, data = jax.random.split(jax.random.key(0), len(SIZES))
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, pairwise(SIZES), strict=True)]
    scale = {
        "factor": jnp.float32(2.0**15),
        "good_steps": jnp.int32(0),
    }
    x = jax.random.normal(data, (8192, 2))
    return params, optimizer.init(params), scale, {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    for kernel in params:
        x = jnp.tanh(x @ kernel.astype(jnp.bfloat16) / kernel.shape[0] ** 0.5)
    return ((x.astype(jnp.float32) - batch["y"]) ** 2).mean()


def rescaled(scale, is_finite):
    grown = jnp.where(scale["good_steps"] == 199, 2 * scale["factor"], scale["factor"])
    return {
        "factor": jnp.where(is_finite, grown, scale["factor"] / 2),
        "good_steps": jnp.where(is_finite, (scale["good_steps"] + 1) % 200, 0),
    }


@memplan.jit(budget="3700KiB", donate_argnums=(0, 1, 2))  # was: @jax.jit(donate_argnums=(0, 1, 2))
def train_step(params, opt_state, scale, batch):
    def scaled(params):
        loss = loss_of(params, batch)
        return loss * scale["factor"], loss

    (_, loss), gradients = jax.value_and_grad(scaled, has_aux=True)(params)
    gradients = jax.tree.map(lambda gradient: gradient / scale["factor"], gradients)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, rescaled(scale, opt_state.last_finite), loss


params, opt_state, scale, batch = start()
losses = []
for _ in range(8):
    params, opt_state, scale, loss = train_step(params, opt_state, scale, batch)
    losses.append(float(loss))
