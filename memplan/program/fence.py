"""What holds an order that XLA would otherwise undo, per platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def fence(values: Sequence[Any]) -> list[Any]:
    """Every result depends on every value: readers of a result run after all the values are there.

    XLA:GPU keeps the barrier until its latency-hiding scheduler is done, so it orders execution. XLA:CPU drops it; there
    the segments are compiled apart (`program/executor.py`).
    """
    return list(jax.lax.optimization_barrier(tuple(values))) if values else []
