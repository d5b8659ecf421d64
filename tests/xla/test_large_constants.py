"""Large constants: each is known from the others by a digest, and planned to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.module import LARGE_NBYTES, Module
from tests.hlo import read_module

ROWS, COLUMNS = 64, LARGE_NBYTES // 256


def module_of(*arrays: np.ndarray) -> Module:
    """The first array doubled, less the others."""
    shape = f"f32[{ROWS},{COLUMNS}]{{1,0}}"
    lines = [f"  %c.{i} = {shape} constant({_text(array)})" for i, array in enumerate(arrays)]
    lines += [f"  %s.0 = {shape} add(%c.0, %c.0)"]
    lines += [f"  %s.{i} = {shape} subtract(%s.{i - 1}, %c.{i})" for i in range(1, len(arrays))]
    lines[-1] = lines[-1].replace("  %", "  ROOT %")
    head = "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {\n"
    return read_module(head + "\n".join(lines) + "\n}\n")


def _text(array: np.ndarray) -> str:
    return "{ " + ", ".join("{ " + ", ".join(map(str, row)) + " }" for row in array.tolist()) + " }"


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (ROWS, COLUMNS)).astype(np.float32)


def test_large_constants_are_known_from_one_another() -> None:
    first, second = drawn(0), drawn(1)
    module, swapped = module_of(first, second), module_of(second, first)
    judge(module, module_of(first, second))
    assert module.fingerprint == module_of(first, second).fingerprint != swapped.fingerprint
    with pytest.raises(NotThePlainModuleError):
        judge(module, swapped)


@pytest.mark.parametrize(("count", "is_known"), [(16383, True), (16384, False)])
def test_integers_of_a_large_constant_are_not_listed(count: int, is_known: bool) -> None:
    elements = ", ".join(map(str, range(count)))
    text = f"""HloModule m, is_scheduled=true

ENTRY %main () -> s32[] {{
  ROOT %c = s32[{count}]{{0}} constant({{{elements}}})
}}
"""
    integers = read_module(text).entry.root.integers
    assert integers == (tuple(range(count)) if is_known else None)


def test_a_step_that_closes_over_large_arrays_is_planned_to_the_bit() -> None:
    weights = [drawn(seed)[:, :ROWS] / 9 for seed in (2, 3)]
    batches = drawn(0).T, drawn(1).T

    def loss(weights: Any) -> Any:
        return sum(
            (jnp.tanh(jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2).mean() for batch in batches
        )

    def step(weights: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights)
        pairs = zip(weights, gradients, strict=True)
        return [weight - 0.1 * gradient for weight, gradient in pairs], value

    plain = memplan.jit(step).plan(weights).report.compiled_peak_bytes
    assert plain is not None
    planned = memplan.jit(step, budget=int(0.8 * plain), split=False).plan(weights)
    assert planned.report.status == "fits"
    results = jax.tree.leaves(planned.compile()(weights))
    expected = jax.tree.leaves(jax.jit(step)(weights))
    for result, array in zip(results, expected, strict=True):
        assert np.asarray(result).tobytes() == np.asarray(array).tobytes()
