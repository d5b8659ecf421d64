from functools import partial

import jax
import pytest


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` for tiny functions, which take the optimizing compiler far longer than they take to run."""
    return partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
