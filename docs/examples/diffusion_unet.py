"""Diffusion: a U-Net in Flax Linen learns to predict the noise in images; its parameters have a moving average."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import memplan

optimizer = optax.adam(3e-4)


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(x)))
        y = y + nn.Dense(self.features)(time)[:, None, None]
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(y)))
        return y + nn.Dense(self.features)(x)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * 2.0 ** jnp.arange(8)
        time = nn.swish(nn.Dense(32)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        fine = Block(16)(nn.Conv(16, (3, 3))(x), time)
        coarse = Block(32)(nn.avg_pool(fine, (2, 2), strides=(2, 2)), time)
        up = jax.image.resize(coarse, (*fine.shape[:3], 32), "nearest")
        return nn.Conv(1, (3, 3))(Block(16)(jnp.concatenate([fine, up], -1), time))


network = UNet()


def start():
    weights, centres = jax.random.split(jax.random.key(0, impl="rbg"))  # compiles faster
    grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(-1, 1, 16)] * 2), -1)
    centres = jax.random.uniform(centres, (32, 1, 1, 2), minval=-0.5, maxval=0.5)
    images = jnp.exp(-8 * ((grid - centres) ** 2).sum(-1, keepdims=True))  # a blob each
    params = jax.jit(network.init)(weights, images, jnp.zeros(32))
    average = jax.tree.map(jnp.copy, params)  # a buffer can be donated only once
    return (params, average, optimizer.init(params)), images


def loss_of(params, images, key):
    keys = jax.random.split(key)
    time, noise = jax.random.uniform(keys[0], (len(images),)), jax.random.normal(keys[1], images.shape)
    signal = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
    noisy = signal * images + jnp.sqrt(1 - signal**2) * noise
    return ((network.apply(params, noisy, time) - noise) ** 2).mean()


@memplan.jit(budget="13MiB", donate_argnums=0)  # was: @jax.jit(donate_argnums=0)
def train_step(state, images, key):
    params, average, opt_state = state
    loss, gradients = jax.value_and_grad(loss_of)(params, images, key)
    updates, opt_state = optimizer.update(gradients, opt_state)
    params = optax.apply_updates(params, updates)
    average = optax.incremental_update(params, average, step_size=0.01)
    return (params, average, opt_state), loss


state, images = start()
losses = []
for key in jax.random.split(jax.random.key(1), 5):
    state, loss = train_step(state, images, key)
    losses.append(float(loss))
