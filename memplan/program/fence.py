"""What holds an order that XLA would otherwise undo, per platform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.program import compat

_FILLED_WITH_ZEROS = {"select_and_scatter_add", "scatter", "scatter_add"}


def fence(values: Sequence[Any]) -> list[Any]:
    """Every result depends on every value: readers of a result run after all the values are there.

    XLA:GPU keeps the barrier until its latency-hiding scheduler is done, so it orders execution. XLA:CPU drops it;
    there the segments are compiled apart (`program/executor.py`).
    """
    return list(jax.lax.optimization_barrier(tuple(values))) if values else []


def fragile_zeros(eqns: Sequence[compat.JaxprEqn]) -> frozenset[tuple[tuple[int, ...], Any]]:
    """Types (shape, dtype) of which XLA needs a whole buffer of zeros somewhere.

    Zeros of that type in any segment are the same instruction to it: it fills the buffer at the first and holds it
    until the last, across every fence. Where the zero comes through the fence, each segment has its own.
    """
    outputs = [compat.aval_of(var) for eqn in eqns if eqn.primitive.name in _FILLED_WITH_ZEROS for var in eqn.outvars]
    return frozenset((aval.shape, aval.dtype) for aval in outputs)


@dataclass(frozen=True)
class Copies:
    """Copies between device and host memory, in the layout that the device holds.

    A host copy has its dimensions in logical order. XLA:GPU keeps the activations of convolutions with channels second
    whatever the program says, those over images of 16 bits excepted, and would transpose such a value into a second
    device buffer before it copies.

    Attributes:
      channels_last: ranks whose values the program's convolutions have with channels last, and XLA has not.
    """

    channels_last: frozenset[int]

    @classmethod
    def for_program(cls, eqns: Sequence[compat.JaxprEqn]) -> Copies:
        ranks = set()
        for eqn in eqns:
            if eqn.primitive.name == "conv_general_dilated":
                spec, dtype = eqn.params["dimension_numbers"].out_spec, compat.aval_of(eqn.outvars[0]).dtype
                narrow_image = dtype.itemsize == 2 and len(spec) == 4
                if spec[0] == 0 and spec[1] == len(spec) - 1 and not narrow_image:
                    ranks.add(len(spec))
        return cls(frozenset(ranks))

    def to_host(self, value: Any) -> Any:
        if value.ndim in self.channels_last:
            value = jax.numpy.moveaxis(value, -1, 1)
        return jax.device_put(value, jax.memory.Space.Host)

    def to_device(self, value: Any) -> Any:
        value = jax.device_put(value, jax.memory.Space.Device)
        return jax.numpy.moveaxis(value, 1, -1) if value.ndim in self.channels_last else value
