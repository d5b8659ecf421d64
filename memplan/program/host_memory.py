"""Arrays in host memory, as jax names it: slices are fetched from them, and written to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def fetch(stack: Any, layer: Any) -> Any:
    """A slice of a stack in host memory, on the device: by memcpy where `layer` is linear in the trip of a loop."""
    return jax.device_put(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), DEVICE)


def write(buffers: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """Stacks in host memory with one layer written anew."""
    return [
        jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(result, HOST), layer, 0)
        for stack, result in zip(buffers, results, strict=True)
    ]
