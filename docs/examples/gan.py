"""A GAN in Haiku: a generator and a discriminator, each with its optimizer, updated in one step."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import memplan

ROWS, NOISE = 2048, 8
generator = hk.without_apply_rng(hk.transform(lambda z: hk.nets.MLP((64, 64, 2), activation=jnp.tanh)(z)))
critic = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP((64, 64, 64, 1), activation=jnp.tanh)(x)[:, 0]))
optimizers = {"generator": optax.adam(1e-4), "critic": optax.adam(2e-3, b1=0.5)}


def start():
    keys = jax.random.split(jax.random.key(0), 3)
    angles = jax.random.uniform(keys[0], (ROWS,), maxval=2 * jnp.pi)
    circle = jnp.stack([jnp.cos(angles), jnp.sin(angles)], -1)
    params = {
        "generator": generator.init(keys[1], jnp.zeros((1, NOISE))),
        "critic": critic.init(keys[2], circle[:1]),
    }
    return params, {name: optimizers[name].init(params[name]) for name in params}, circle


def critic_loss(own, params, real, noise):
    fake = generator.apply(params["generator"], noise)
    return (jax.nn.softplus(-critic.apply(own, real)) + jax.nn.softplus(critic.apply(own, fake))).mean()


def generator_loss(own, params, real, noise):
    return jax.nn.softplus(-critic.apply(params["critic"], generator.apply(own, noise))).mean()


@memplan.jit(budget="2600KiB", donate_argnums=(0, 1))  # was: @jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_states, real, key):
    params, opt_states, losses = dict(params), dict(opt_states), {}
    noise = jax.random.normal(key, (len(real), NOISE))
    for name, loss_of in (("critic", critic_loss), ("generator", generator_loss)):
        losses[name], gradients = jax.value_and_grad(loss_of)(params[name], params, real, noise)
        updates, opt_states[name] = optimizers[name].update(gradients, opt_states[name])
        params[name] = optax.apply_updates(params[name], updates)
    return params, opt_states, losses


params, opt_states, real = start()
losses = []
for key in jax.random.split(jax.random.key(1), 6):
    params, opt_states, both = train_step(params, opt_states, real, key)
    losses.append(float(both["critic"]))
