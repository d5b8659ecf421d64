"""A step planned within a share of what `jax.jit` takes, and its results, which are `jax.jit`'s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from memplan.stages import Planned

Step = Callable[..., Any]
Made = tuple[Step, tuple[Any, ...]]
Make = Callable[[], Made]
"""A step and its arguments, made anew for every run."""

# for the compiler
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Run:
    """A step as `jax.jit` compiles it, and as it was planned within a share of that."""

    plain: Any
    planned: Planned

    @property
    def changed_kernels(self) -> bool:
        """Not only kernels were decided on, but also residuals of loops or slabs, which come with other kernels."""
        report = self.planned.report
        return bool(report.slab_loops) or any("trips" in row.name for row in report.decisions)


def within_share(
    share: float, step: Step, args: tuple[Any, ...], closed_over: int = 0, **options: Any
) -> Run:
    """Fails unless the plan is within the share, and has decided something.

    Args:
      closed_over: bytes of constants, which XLA:CPU does not count.
    """
    jit_options = {name: option for name, option in options.items() if name != "split"}
    plain = jax.jit(step, compiler_options=QUICK, **jit_options).lower(*args).compile()
    memory = plain.memory_analysis()
    resident = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    budget = int(share * (closed_over + resident + memory.temp_size_in_bytes))
    planned = memplan.jit(step, budget=budget, compiler_options=QUICK, **options).plan(*args)
    report = planned.report
    assert report.status == "fits" and report.compiled_peak_bytes is not None
    assert report.compiled_peak_bytes <= min(budget, 1.02 * report.predicted_peak_bytes)
    run = Run(plain, planned)
    assert run.changed_kernels or any(row.decision != "keep" for row in report.decisions)
    return run


def assert_same(actual: Any, expected: Any, run: Run) -> None:
    """To the bit where kernels alone were planned; other kernels round otherwise."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, expected_leaf in zip(
        map(raw, jax.tree.leaves(actual)), map(raw, jax.tree.leaves(expected)), strict=True
    ):
        assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
        if run.changed_kernels and leaf.dtype.kind == "f":
            tolerance = 1e3 * float(jnp.finfo(leaf.dtype).eps)
            np.testing.assert_allclose(
                leaf,
                expected_leaf,
                rtol=tolerance,
                atol=tolerance * np.abs(expected_leaf).max(initial=0),
            )
        else:
            assert leaf.tobytes() == expected_leaf.tobytes()


def raw(leaf: Any) -> np.ndarray:
    """Keys as what they are made of."""
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """In jax's default type."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), float)


def layers(count: int, width: int, seed: int = 0) -> list[jax.Array]:
    """Square weights under which values keep their size."""
    return [normal(width, width, seed=seed + layer, scale=width**-0.5) for layer in range(count)]


def mlp(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def descended(weights: Any, gradients: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda weight, gradient: weight - rate * gradient, weights, gradients)
