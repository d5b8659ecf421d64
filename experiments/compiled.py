"""The compiler's account of an executable of `jax.jit`."""

from typing import Any


def device_bytes(compiled: Any) -> int:
    """Temporaries, arguments and outputs, donated ones once."""
    stats = compiled.memory_analysis()
    moved = stats.temp_size_in_bytes + stats.argument_size_in_bytes
    return moved + stats.output_size_in_bytes - stats.alias_size_in_bytes
