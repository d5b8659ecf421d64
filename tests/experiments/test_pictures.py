"""The README's pictures, of small steps and made-up rows."""

import jax
import jax.numpy as jnp
import pytest

import memplan
from experiments import pictures
from memplan.report.comparison import Comparison, Row

PNG = b"\x89PNG"


def test_one_step_by_each_method() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x).sum()

    report = memplan.jit(step).plan(jax.ShapeDtypeStruct((64, 64), jnp.float32)).report
    assert report.lines and report.timeline
    rows = [Row(name, 2**30, 0, 0.1, True) for name in pictures.METHODS]
    rows.append(Row("a method that is not drawn", None, None, None, None))
    comparison = Comparison(tuple(rows), "cpu", 2**30, 0, ())
    assert pictures.of_one_step(report, comparison).startswith(PNG)


def test_volumes_are_drawn_where_they_fit() -> None:
    plain = {"status": "fits", "pixels": 64**3, "budget_bytes": 10, "step_s": 0.5}
    rows = [
        {**plain, "plain_bytes": 9, "compiled_bytes": 9, "checkpoint_bytes": 10,
         "jit_step_s": 0.25, "checkpoint_step_s": 1.0},
        {**plain, "plain_bytes": 11, "compiled_bytes": 9, "checkpoint_bytes": 11,
         "jit_step_s": 0.25, "checkpoint_step_s": 1.0},
        {"status": "failed", "pixels": 96**3},
    ]  # fmt: skip
    assert pictures._fitting(rows, "jit_step_s", "plain_bytes") == [(64**3, 64**3 / 0.25 / 1e6)]
    own = pictures._fitting(rows, "step_s", "compiled_bytes")
    assert own == [(64**3, pytest.approx(0.524288))] * 2
    assert pictures.of_volumes(rows).startswith(PNG)
