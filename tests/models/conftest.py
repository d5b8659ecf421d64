from functools import partial

import jax
import pytest


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` without optimization, for tiny functions that run faster than they compile."""
    return partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
