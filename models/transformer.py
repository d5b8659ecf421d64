"""Decoder-only transformer with unfused attention, unrolled or scanned over its layers.

Vaswani et al. (2017), in the pre-norm form of GPT-2 (Radford et al., 2019): learned positions,
GELU, layer norms before attention, before the MLP and before the output. There is no dropout.
Attention materializes its (batch, heads, tokens, tokens) weights.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

CHECKPOINTS = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_offloaded": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}
"""Name -> policy of `jax.checkpoint` for what a layer keeps for its backward pass."""


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder.

    `context` is the largest number of tokens per sequence. `tied` reuses the token embedding as
    output projection. `scan` runs the layers as one `lax.scan` over stacked parameters instead of
    unrolling them (see `stack_layers`). `checkpoint` names a policy of `CHECKPOINTS` for each
    layer. `dtype` is that of activations; parameters, layer statistics, softmax and logits are
    float32.
    """

    layers: int = 24
    width: int = 1024
    heads: int = 16
    mlp_ratio: int = 4
    vocab: int = 32768
    context: int = 1024
    tied: bool = True
    scan: bool = False
    checkpoint: str = ""
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"Width {self.width} cannot be split among {self.heads} heads; choose a divisor of "
                "it."
            )
        if self.checkpoint and self.checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"`checkpoint` is one of {', '.join(CHECKPOINTS)}; not {self.checkpoint!r}."
            )


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, width) -> same."""
        config, tokens = self.config, x.shape[1]
        size = config.width // config.heads
        query, key, value = (
            nn.DenseGeneral((config.heads, size), dtype=config.dtype, name=name)(x)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(_wide(config.dtype)) * size**-0.5
        causal = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min)).astype(
            config.dtype
        )
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(config.width, axis=(-2, -1), dtype=config.dtype, name="output")(
            mixed
        )


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, width) -> same."""
        config = self.config
        x = x + Attention(config, name="attention")(
            nn.LayerNorm(dtype=config.dtype, name="norm_attention")(x)
        )
        y = nn.LayerNorm(dtype=config.dtype, name="norm_mlp")(x)
        y = nn.gelu(nn.Dense(config.mlp_ratio * config.width, dtype=config.dtype, name="mlp_in")(y))
        return x + nn.Dense(config.width, dtype=config.dtype, name="mlp_out")(y)


class Decoder(nn.Module):
    """Causal language model."""

    config: DecoderConfig = DecoderConfig()

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, tokens) integers -> logits of the next token (batch, tokens, vocab), float32."""
        config, length = self.config, tokens.shape[-1]
        if length > config.context:
            raise ValueError(
                f"{length} tokens exceed the context of {config.context}; shorten them or raise "
                "`context`."
            )
        narrow = nn.initializers.normal(0.02)
        embed = nn.Embed(
            config.vocab, config.width, embedding_init=narrow, dtype=config.dtype, name="embed"
        )
        positions = self.param("positions", narrow, (config.context, config.width))
        x = embed(tokens) + positions[:length].astype(config.dtype)
        x = nn.LayerNorm(dtype=config.dtype, name="norm_out")(self._layers(x))
        if config.tied:
            logits = embed.attend(x)
        else:
            logits = nn.Dense(config.vocab, use_bias=False, dtype=config.dtype, name="unembed")(x)
        return logits.astype(_wide(config.dtype))

    def _layers(self, x: jax.Array) -> jax.Array:
        layer = Layer
        if self.config.checkpoint:
            layer = nn.remat(
                Layer, prevent_cse=not self.config.scan, policy=CHECKPOINTS[self.config.checkpoint]
            )
        if not self.config.scan:
            for index in range(self.config.layers):
                x = layer(self.config, name=f"layer_{index}")(x)
            return x
        repeat = nn.scan(
            lambda layer, carry, _: (layer(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.layers,
        )
        return repeat(layer(self.config, name="layers"), x, None)[0]


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Convert the parameters of an unrolled decoder to those of a scanned one.

    Stacks "layer_0", "layer_1", ... along a new axis of "layers". Takes and returns the collection
    "params". The logits stay the same up to rounding.
    """
    layers = [
        params[f"layer_{index}"]
        for index in range(sum(name.startswith("layer_") for name in params))
    ]
    unstacked = {name: value for name, value in params.items() if not name.startswith("layer_")}
    return unstacked | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def _wide(dtype: Any) -> Any:
    """float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)
