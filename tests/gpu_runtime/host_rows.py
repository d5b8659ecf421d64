"""A program whose loops write rows of a host array and read them back, each a trip ahead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memplan.hardware import catalog
from memplan.program import compat
from memplan.program.host_memory import HostArray
from memplan.xla.host_copies import copy_slices
from memplan.xla.module import Module
from memplan.xla.serialize import serialize

TRIPS, ROWS, WIDTH = 6, 4, 256


def there_and_back(card: str) -> dict[str, Any]:
    """Are the rows that come back those that were written? And how many slices memplan made copies."""
    copies = []

    def rewrite(proto: bytes) -> bytes | None:
        if b"dynamic_slice_config" not in proto:
            return None
        module = copy_slices(Module.read(proto), catalog.named(card))
        ops = [op for body in module.values() for op in body.ops.values()]
        copies.append(sum("dynamic_slice_fusion" in op.backend_config for op in ops))
        return serialize(module)

    assert jax.devices()[0].platform == "gpu"  # the plugin is loaded, which the hook needs
    compat.register_hook(rewrite, "cuda", scheduled=True)
    x = np.arange(TRIPS * ROWS * WIDTH, dtype=np.float32).reshape(TRIPS * ROWS, WIDTH)
    result = jax.jit(_loops)(x)
    return {"equal": bool(np.array_equal(result, 2 * x + 1)), "copies": copies}


def _loops(x: jax.Array) -> jax.Array:
    slab = jnp.zeros((ROWS, WIDTH))

    def write(carry: Any, rows: jax.Array) -> Any:
        trip, host, block = carry
        return (trip + 1, host.written(trip - 1, block), 2 * rows + 1), None

    def read(carry: Any, _: None) -> Any:
        trip, arrived = carry
        return (trip + 1, host.rows(trip + 1, (0, ROWS))), arrived

    empty = HostArray.empty(x.shape, x.dtype, 0, ROWS, TRIPS, (ROWS, ROWS))
    (_, host, block), _ = lax.scan(
        write, (jnp.int32(0), empty, slab), x.reshape(TRIPS, ROWS, WIDTH)
    )
    host = host.written(TRIPS - 1, block)
    _, slabs = lax.scan(read, (jnp.int32(0), host.rows(0, (0, ROWS))), length=TRIPS)
    return slabs.reshape(x.shape)
