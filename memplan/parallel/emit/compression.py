"""An all-reduce with half the bytes on the wire, and what rounding takes away remembered for the next step.

Error feedback after Seide et al., 1-bit SGD (Interspeech 2014), and Karimireddy et al. (ICML 2019): each device adds
what its last message left out to its next one. Sums are formed in float32: parts are exchanged, added, and gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

WIRE_DTYPES = ("bfloat16", "float16")
SMALLEST_NBYTES = 1 << 16
"""Smaller messages pay for latency, not for bytes: they stay as they are."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Remembered:
    """A training state, and what every device has yet to send: float32 arrays, split among the devices."""

    state: Any
    errors: tuple[Array, ...]


@dataclass
class Compressor:
    """The compressed messages of one step, in the order they are sent."""

    dtype: str  # what floats are on the wire
    # what the last step left out, one array per rounding; None where only sizes are asked for
    before: Sequence[Array] | None = None
    after: list[Array] = field(default_factory=list)  # what this one leaves out

    def pays_for(self, flat: Array) -> bool:
        return flat.dtype == jnp.float32 and flat.nbytes >= SMALLEST_NBYTES

    def all_reduce(self, flat: Array, axes: Sequence[str], sizes: Sequence[int]) -> Array:
        """Over axes of these sizes."""
        devices, names = math.prod(sizes), tuple(axes)
        sent = self._rounded(padded(flat, devices)).reshape(devices, -1)
        parts = self._widened(jax.lax.all_to_all(sent, names, 0, 0, tiled=True))
        own = self._rounded(parts.sum(0))
        return self._widened(jax.lax.all_gather(own, names, tiled=True))[: flat.size]

    def _rounded(self, value: Array) -> Array:
        """As bits, which no compiler widens on the way."""
        number = len(self.after)
        known = value if self.before is None else value + self.before[number]
        short = known.astype(self.dtype)
        self.after.append(known - short.astype(jnp.float32))
        return jax.lax.bitcast_convert_type(short, jnp.uint16)

    def _widened(self, bits: Array) -> Array:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(self.dtype)).astype(jnp.float32)


def padded(flat: Array, parts: int) -> Array:
    """With zeros behind it, so that it falls into so many equal parts."""
    rest = -flat.size % parts
    return jax.lax.pad(flat, np.zeros((), flat.dtype), [(0, rest, 0)]) if rest else flat
