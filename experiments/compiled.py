"""Device memory of an executable of `jax.jit`, as the compiler reports it."""

from typing import Any


def device_bytes(compiled: Any) -> int:
    """Bytes of temporaries, arguments and outputs; donated arrays count once."""
    stats = compiled.memory_analysis()
    total = stats.temp_size_in_bytes + stats.argument_size_in_bytes
    return total + stats.output_size_in_bytes - stats.alias_size_in_bytes
