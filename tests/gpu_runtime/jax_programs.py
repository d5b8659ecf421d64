"""Programs of jax that the tests run on the stand-in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name


def describe() -> dict[str, Any]:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {"platform": device.platform, "kind": device.device_kind, "limit": stats["bytes_limit"]}


def offload() -> list[list[float]]:
    """Two steps of a network whose activations go to pinned memory and come back: losses and sums of gradients."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(weights: list[Any], x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: checkpoint_name(jnp.tanh(x @ w), "kept"), policy=policy)
        for w in weights:
            x = layer(x, w)
        return (x * x).mean()

    @jax.jit
    def step(weights: list[Any], x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((64, 64)), jnp.float32) / 8 for _ in range(4)]
    x = jnp.asarray(rng.standard_normal((64, 64)), jnp.float32)
    history = []
    for _ in range(2):
        weights, value = step(weights, x)
        history.append([float(value), *(float(np.asarray(w, np.float64).sum()) for w in weights)])
    return history


def unwritten_library() -> str:
    """The error that a call of a library's that nobody wrote ends in."""
    try:
        jax.block_until_ready(jnp.fft.fft(jnp.ones(8)))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""
