"""Large constants are set aside while a module is text, each known from the others, and put back to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.program import compat
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.large_literals import LARGE_NBYTES, put_back, set_aside
from tests.hlo import read_module

ROWS, COLUMNS = 64, LARGE_NBYTES // 256


def module_of(*arrays: np.ndarray) -> bytes:
    """Arrays added up, as XLA's text."""
    shape = f"f32[{ROWS},{COLUMNS}]{{1,0}}"
    lines = [f"  %c.{i} = {shape} constant({_text(array)})" for i, array in enumerate(arrays)]
    lines += [f"  %s.0 = {shape} add(%c.0, %c.0)"]
    lines += [f"  %s.{i} = {shape} subtract(%s.{i - 1}, %c.{i})" for i in range(1, len(arrays))]
    lines[-1] = lines[-1].replace("  %", "  ROOT %")
    head = f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[{ROWS},{COLUMNS}] {{\n"
    return compat.module_proto(head + "\n".join(lines) + "\n}\n")


def _text(array: np.ndarray) -> str:
    return "{ " + ", ".join("{ " + ", ".join(map(str, row)) + " }" for row in array.tolist()) + " }"


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (ROWS, COLUMNS)).astype(np.float32)


def test_a_module_is_itself_again() -> None:
    whole = module_of(drawn(0), drawn(1), drawn(0))
    small, literals = set_aside(whole)
    assert len(literals) == 2 and len(small) < LARGE_NBYTES
    text = compat.module_text(small)
    assert text.count("constant({...})") == 3 and len(text) < LARGE_NBYTES
    again = put_back(compat.module_proto(text), literals)
    assert compat.module_text(again) == compat.module_text(whole)


def test_a_small_literal_stays() -> None:
    whole = compat.module_proto(
        "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[2] {\n  ROOT %c = f32[2]{0} constant({1, 2})\n}\n"
    )
    assert set_aside(whole) == (whole, []) and put_back(whole, []) == whole


def test_the_judge_knows_large_constants_from_one_another() -> None:
    text = compat.module_text(set_aside(module_of(drawn(0), drawn(1)))[0])
    swapped = text.replace('large_literal="0"', 'large_literal="2"').replace('large_literal="1"', 'large_literal="0"')
    judge(read_module(text), read_module(text))
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(text), read_module(swapped))


def test_a_step_that_closes_over_large_arrays_is_planned_to_the_bit() -> None:
    weights = [drawn(seed)[:, :ROWS] / 9 for seed in (2, 3)]
    one, other = drawn(0).T, drawn(1).T

    def loss(weights: Any) -> Any:
        return sum((jnp.tanh(jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2).mean() for batch in (one, other))

    def step(weights: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value

    plain = memplan.jit(step).plan(weights).report.compiled_peak_bytes
    assert plain is not None
    planned = memplan.jit(step, budget=int(0.8 * plain), split=False).plan(weights)
    assert planned.report.status == "fits"
    for found, expected in zip(
        map(np.asarray, jax.tree.leaves(planned.compile()(weights))),
        jax.tree.leaves(jax.jit(step)(weights)),
        strict=True,
    ):
        assert found.tobytes() == np.asarray(expected).tobytes()
