"""Reinforcement learning on the device, as in PureJaxRL: a scan plays many pendulums, then PPO updates the policy."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

import memplan

ENVIRONMENTS, TIME, EPOCHS = 64, 64, 4
SIZES = (3, 64, 64, 2)  # observation; mean of the action, value of the state
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


def start():
    *keys, states = jax.random.split(jax.random.key(0), len(SIZES))
    params = [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in zip(keys, pairwise(SIZES), strict=True)]
    return params, optimizer.init(params), jax.random.uniform(states, (ENVIRONMENTS, 2), minval=-1, maxval=1)


def heads(params, states):
    x = jnp.stack([jnp.cos(states[..., 0]), jnp.sin(states[..., 0]), states[..., 1]], -1)
    for kernel in params[:-1]:
        x = jnp.tanh(x @ kernel)
    mean, value = jnp.moveaxis(x @ params[-1], -1, 0)
    return mean, value


def play(params, states, key):
    def tick(states, key):
        mean, value = heads(params, states)
        action = mean + jax.random.normal(key, mean.shape)
        angle, speed = states[:, 0], states[:, 1]
        speed = 0.95 * speed + 0.1 * (jnp.sin(angle) + jnp.clip(action, -2, 2))
        reward = jnp.cos(angle) - 0.1 * speed**2
        return jnp.stack([angle + 0.1 * speed, speed], -1), (states, action, -((action - mean) ** 2) / 2, value, reward)

    return jax.lax.scan(tick, states, jax.random.split(key, TIME))


def advantages_of(values, rewards, last):
    def back(carry, step):
        advantage, following = carry
        value, reward = step
        advantage = reward + 0.9 * following - value + 0.9 * 0.95 * advantage
        return (advantage, value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last), last), (values, rewards), reverse=True)[1]


def loss_of(params, states, actions, old, advantages, targets):
    mean, value = heads(params, states)
    ratio = jnp.exp(-((actions - mean) ** 2) / 2 - old)
    scaled = (advantages - advantages.mean()) / advantages.std()
    gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
    return 0.5 * ((value - targets) ** 2).mean() - gain.mean()


@memplan.jit(budget="3500KiB", donate_argnums=(0, 1, 2))  # was: @jax.jit(donate_argnums=(0, 1, 2))
def train_step(params, opt_state, states, key):
    states, (seen, actions, old, values, rewards) = play(params, states, key)
    advantages = advantages_of(values, rewards, heads(params, states)[1])

    def epoch(carry, _):
        params, opt_state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params, seen, actions, old, advantages, advantages + values)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    (params, opt_state), of_epochs = jax.lax.scan(epoch, (params, opt_state), None, length=EPOCHS)
    return params, opt_state, states, of_epochs[-1]


params, opt_state, states = start()
losses = []
for key in jax.random.split(jax.random.key(1), 5):
    params, opt_state, states, loss = train_step(params, opt_state, states, key)
    losses.append(float(loss))
