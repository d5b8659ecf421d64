"""Findings: the outputs that replace arguments, and the smallest savings that are listed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan.program.trace import trace
from memplan.results.findings import MIN_BYTES, MIN_SHARE, arguments_of, is_large, replaced_inputs

STATE, OTHER = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)


def test_small_is_below_a_share_of_the_step_or_a_mebibyte() -> None:
    assert is_large(MIN_BYTES, 10) and not is_large(MIN_BYTES - 1, 10)
    huge = int(1000 * MIN_BYTES / MIN_SHARE)
    assert is_large(1000 * MIN_BYTES, huge) and not is_large(1000 * MIN_BYTES - 1, huge)


def test_outputs_replace_donated_arguments_first_and_each_one_once() -> None:
    def step(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return a + b, b * 2, a - 1, c.sum()

    shapes = STATE, STATE, OTHER
    assert replaced_inputs(trace(step, shapes, {}, {})) == {0: 0, 1: 1}
    assert replaced_inputs(trace(step, shapes, {}, {"donate_argnums": 1})) == {0: 1, 1: 0}


def test_an_output_may_be_a_number_or_nothing() -> None:
    assert memplan.jit(lambda x: (x + 1, 2.0)).plan(STATE).report.findings == ()
    assert (
        memplan.jit(lambda x: jax.debug.print("{}", x[0] + 1, ordered=True))
        .plan(STATE)
        .report.findings
        == ()
    )


def test_an_argument_that_is_not_read_is_not_replaced() -> None:
    assert replaced_inputs(trace(lambda a, b: b + 1, (STATE, STATE), {}, {})) == {0: 1}
    kept = trace(lambda a, b: b + 1, (STATE, STATE), {}, {"keep_unused": True})
    assert replaced_inputs(kept) == {0: 0}


def test_arguments_count_as_donate_argnums_does() -> None:
    def step(state: Any, mode: str, batch: Any, nothing: Any) -> Any:
        return state["w"] + batch

    program = trace(
        step, ({"b": STATE, "w": STATE}, "fast", STATE, None), {}, {"static_argnums": 1}
    )
    arguments = [
        (argument.number, argument.name, list(argument.inputs))
        for argument in arguments_of(program)
    ]
    assert arguments == [(0, "argument 0 (state)", [0, 1]), (2, "argument 2 (batch)", [2])]


@pytest.mark.parametrize("effect", [False, True])
def test_a_report_has_findings_without_another_compilation(effect: bool) -> None:
    def step(state: jax.Array, x: jax.Array) -> Any:
        if effect:
            jax.debug.print("{}", x[0, 0], ordered=True)
        return jnp.tanh(x @ state) @ state, jnp.concatenate([x, x])

    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    report = memplan.jit(step).plan(jax.ShapeDtypeStruct((512, 512), jnp.float32), x).report
    donate, output = report.findings
    assert (donate.kind, donate.position, donate.gained_bytes) == ("donate", 1, 1024 * 512 * 4)
    assert (output.kind, output.position, output.gained_bytes) == ("output", 1, 2 * 1024 * 512 * 4)
    assert "result[1]" in output.advice and "test_findings.py:" in output.source
    assert report.attempts == 1 and {finding.measured for finding in report.findings} == {"counted"}
