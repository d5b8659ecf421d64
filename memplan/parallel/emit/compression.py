"""An all-reduce that sends half the bytes, with error feedback.

After Seide et al., 1-bit SGD (Interspeech 2014), and Karimireddy et al. (ICML 2019): each device adds the rounding
error of its last message to its next one. Sums are formed in float32: parts are exchanged, added, and gathered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

WIRE_DTYPES = ("bfloat16", "float16")
SMALLEST_NBYTES = 1 << 16  # latency dominates smaller messages, which are not compressed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Remembered:
    """A training state with the rounding errors of its last messages."""

    state: Any
    errors: tuple[Array, ...]  # float32, split among the devices


@dataclass
class Compressor:
    """The compressed messages of one step, in the order they are sent."""

    dtype: str  # of floats that are sent
    before: Sequence[Array] | None = None  # errors of the last step, one array per rounding; None: only shapes matter
    after: list[Array] = field(default_factory=list)  # errors of this step

    def pays_for(self, flat: Array) -> bool:
        return flat.dtype == jnp.float32 and flat.nbytes >= SMALLEST_NBYTES

    def all_reduce(self, flat: Array, axes: Sequence[str], sizes: Sequence[int]) -> Array:
        devices, names = math.prod(sizes), tuple(axes)
        sent = self._rounded(padded(flat, devices)).reshape(devices, -1)
        parts = self._widened(jax.lax.all_to_all(sent, names, 0, 0, tiled=True))
        own = self._rounded(parts.sum(0))
        return self._widened(jax.lax.all_gather(own, names, tiled=True))[: flat.size]

    def _rounded(self, value: Array) -> Array:
        """As bits, so that the compiler cannot widen them before they are sent."""
        number = len(self.after)
        known = value if self.before is None else value + self.before[number]
        short = known.astype(self.dtype)
        self.after.append(known - short.astype(jnp.float32))
        return jax.lax.bitcast_convert_type(short, jnp.uint16)

    def _widened(self, bits: Array) -> Array:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(self.dtype)).astype(jnp.float32)


def padded(flat: Array, parts: int) -> Array:
    """Pad with zeros to a multiple of `parts`."""
    rest = -flat.size % parts
    return jax.lax.pad(flat, np.zeros((), flat.dtype), [(0, rest, 0)]) if rest else flat
