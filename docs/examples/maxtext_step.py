"""In the style of MaxText: a jitted step with shardings, static arguments and donation, compiled ahead of the loop."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import memplan


@dataclass(frozen=True)
class Config:
    vocabulary: int = 64
    width: int = 32
    layers: int = 2
    batch: int = 16
    length: int = 128


class Decoder(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        config = self.config
        x = nn.Embed(config.vocabulary, config.width)(tokens)
        for _ in range(config.layers):
            mask = nn.make_causal_mask(tokens)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(config.width)(nn.gelu(nn.Dense(4 * config.width)(nn.LayerNorm()(x))))
        return nn.Dense(config.vocabulary)(nn.LayerNorm()(x))


def train_step(config, state, data, rng):
    def loss_of(params):
        noise = jax.random.bernoulli(rng, 0.05, data.shape)
        logits = state.apply_fn({"params": params}, jnp.where(noise, 0, data)[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, data[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss}


config = Config()
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
data_sharding = NamedSharding(mesh, PartitionSpec("data"))
replicated = NamedSharding(mesh, PartitionSpec())


def initial_state(rng):
    model = Decoder(config)
    params = model.init(rng, jnp.zeros((1, config.length), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


state_shardings = jax.tree.map(lambda leaf: replicated, jax.eval_shape(initial_state, jax.random.key(0)))
state = jax.jit(initial_state, out_shardings=state_shardings)(jax.random.key(0))

p_train_step = memplan.jit(budget="16MiB")(  # was: p_train_step = jax.jit(
    train_step,
    in_shardings=(state_shardings, data_sharding, replicated),
    out_shardings=(state_shardings, None),
    static_argnums=0,
    donate_argnums=1,
)
shaped_batch = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
print(p_train_step.lower(config, state, shaped_batch, jax.random.key(1)).compile().memory_analysis())

losses = []
for step in range(5):
    rng = jax.random.fold_in(jax.random.key(1), step)
    tokens = jax.random.randint(jax.random.key(step), shaped_batch.shape, 0, config.vocabulary)
    batch = jax.device_put(tokens, data_sharding)
    state, metrics = p_train_step(config, state, batch, rng)
    losses.append(float(metrics["loss"]))
