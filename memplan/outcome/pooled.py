"""What XLA's memory pools make of a step's bytes, and the environment in which they give them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.compilation.outcome import Outcome
from memplan.program import compat
from memplan.xla import local
from memplan.xla.pools import Taken, least_limit


@dataclass(frozen=True)
class Pooled:
    """A step in empty pools."""

    # its pool, with arguments, outputs and then the temporaries, which are one block; None where a device's memory is
    # not in a pool
    device: Taken | None
    host: Taken  # the pinned pool, with arguments and then the temporaries, likewise
    exports: tuple[str, ...]  # lines of a shell that set what the environment of this process lacks for the step to run


def pooled(found: Outcome, pools: local.Pools) -> Pooled:
    """A step for a GPU in pools as a client makes them that starts in this environment."""
    memory, per_device = found.executable.memory, found.program.per_device.jaxpr
    nbytes = [compat.nbytes_of(var.aval) for var in per_device.invars]
    held = [nbytes[position] for position in sorted(found.program.on_host)]
    kept = [one for position, one in enumerate(nbytes) if position not in found.program.on_host]
    # The driver allocates constants, beside the pool (`GpuExecutable::ResolveConstantGlobals`).
    in_pool = memory.resident_bytes - memory.constant_bytes
    on_device = [*kept, max(0, in_pool - sum(kept)), memory.temp_bytes]
    on_host = [*held, max(0, memory.host_bytes - sum(held))]
    # Of a GPU that is here, what is known is what jax may use already.
    whole, fraction = found.target.device.memory_bytes, pools.fraction if found.target.described else 1.0
    device = pools.of_device(whole, fraction).take(on_device) if pools.of_bfc else None
    host = pools.host.take(on_host)

    def exports() -> Iterator[str]:
        if host.refused_nbytes is not None:
            yield local.export(local.HOST_LIMIT, str(least_limit(on_host, 1 << 30)))
        if device is None or device.refused_nbytes is None:
            return
        if not pools.preallocates:
            yield local.export(local.PREALLOCATE, "true")
        share = math.ceil(100 * sum(on_device) * (pools.fraction / fraction) / whole) / 100  # of all that the card has
        if pools.fraction < share <= 1:
            yield local.export(local.FRACTION, f"{share:.2f}")

    return Pooled(device, host, tuple(exports()))
