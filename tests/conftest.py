"""For all tests: no example of a property has a time limit, since other work may run beside it.

Keras runs on jax. LLVM optimizes only what the slow tests compile: kernels of a test run once or
twice, and optimizing them took a sixth of the default suite's time. What XLA does before LLVM
(passes, fusions, schedules and buffers) is the same, and so is all that memplan decides. If
XLA_FLAGS has the option, it stays.
"""

import os

import pytest
from hypothesis import settings

os.environ["KERAS_BACKEND"] = "jax"

_OPTIMIZATION = "--xla_backend_optimization_level"

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if config.option.markexpr != "slow" and _OPTIMIZATION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OPTIMIZATION}=0".strip()
