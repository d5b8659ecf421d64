"""Machine code of absent GPUs, kept from one compilation to the next.

Nothing of it ever runs, yet making it takes XLA most of a compilation; candidates for one step share most kernels. What
a kernel is kept under does not name the GPU, and XLA locks no file: each GPU and thread has one of its own.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from pathlib import Path

from memplan.hardware.device import GpuTarget

_MOST_BYTES = 2**26  # XLA reads and writes the whole file at every compilation


def kernel_cache_file(target: GpuTarget) -> Path:
    """The file for `xla_gpu_kernel_cache_file`; gone when the process ends."""
    path = Path(_folder(target, threading.get_ident()).name) / "kernels"
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        path.unlink()
    return path


@functools.cache
def _folder(target: GpuTarget, thread: int) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memplan-kernels-", ignore_cleanup_errors=True)
