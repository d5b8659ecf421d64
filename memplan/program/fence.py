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
class Channels:
    """Values that XLA:GPU has with channels second, though the program has them last: activations of convolutions.

    Images of 16 bits are excepted. A value that leaves XLA's sight, through a fence or to the host, does so in the
    program's order of dimensions: behind a fence, kernels then read it by a transposing view, which XLA takes for slow
    and fuses less; a copy to the host transposes it into a second device buffer first. So both get it channels second.

    Attributes:
      ranks: of such values. filters: shapes of the same ranks that are none.
    """

    ranks: frozenset[int]
    filters: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def of_program(cls, eqns: Sequence[compat.JaxprEqn]) -> Channels:
        ranks, filters = set(), set()
        for eqn in eqns:
            if eqn.primitive.name == "conv_general_dilated":
                spec, dtype = eqn.params["dimension_numbers"].out_spec, compat.aval_of(eqn.outvars[0]).dtype
                narrow_image = dtype.itemsize == 2 and len(spec) == 4
                if spec[0] == 0 and spec[1] == len(spec) - 1 and not narrow_image:
                    ranks.add(len(spec))
                    filters.add(compat.aval_of(eqn.invars[1]).shape)
        return cls(frozenset(ranks), frozenset(filters))

    def second(self, value: Any) -> Any:
        return jax.numpy.moveaxis(value, -1, 1) if self._concerns(value.shape) else value

    def last(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Undoes `second` on a value that has this shape in the program."""
        return jax.numpy.moveaxis(value, 1, -1) if self._concerns(shape) else value

    def to_host(self, value: Any) -> Any:
        return jax.device_put(self.second(value), jax.memory.Space.Host)

    def to_device(self, value: Any, shape: tuple[int, ...]) -> Any:
        return self.last(jax.device_put(value, jax.memory.Space.Device), shape)

    def _concerns(self, shape: tuple[int, ...]) -> bool:
        return len(shape) in self.ranks and shape not in self.filters
