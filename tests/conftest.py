"""For all tests: no example of a property has a time limit, since other work may run beside it.

Keras runs on jax. LLVM optimizes nothing: kernels of a test run once or twice, and optimizing them
took a sixth of the default suite's time, and a fifth or more of the slow tests that were timed.
What XLA does before LLVM (passes, fusions, schedules and buffers) is the same, and so is all that
memplan decides. If XLA_FLAGS has the option, it stays; tests that need optimized kernels ask for
them.
"""

import gc
import os

from hypothesis import settings

os.environ["KERAS_BACKEND"] = "jax"

_OPTIMIZATION = "--xla_backend_optimization_level"

# Python collects garbage after so many new objects: with its own 700, 5 % of the time went there.
_NEW_OBJECTS = 20_000

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if _OPTIMIZATION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OPTIMIZATION}=0".strip()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not visit it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
