"""Steps that scan, from `memplan.jit` to the compiled program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.looping import ways
from memplan.pipeline import target_of
from memplan.planning.loop import Loop, Residuals, moved_nbytes, stacked_nbytes
from memplan.planning.plan import Plan
from memplan.program.loops import with_residuals
from memplan.program.trace import as_step, trace
from memplan.xla.traffic import traffic
from tests.program.test_targets import needs_compiler

LAYERS, WIDTH, BATCH = 12, 512, 8192


def loss(weights: Any, x: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        y = jnp.tanh(x @ weight)
        return x + jnp.sin(y) * jnp.cos(x), None

    return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()


def train(weights: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return weights - 0.1 * gradients, value


SHAPES = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def arrays(layers: int = 4, width: int = 32, batch: int = 256) -> tuple[jax.Array, jax.Array]:
    key, other = jax.random.split(jax.random.key(0))
    return jax.random.normal(key, (layers, width, width)) / width, jax.random.normal(other, (batch, width))


def test_ways_stack_less_and_less() -> None:
    program, device = trace(train, SHAPES, {}, {}), target_of("h200").device
    found = ways(program, device, moves=False)
    nbytes = [stacked_nbytes(*way.loops[0]) for way in found]
    assert nbytes == sorted(set(nbytes))
    assert nbytes[0] == LAYERS * 4 * BATCH * WIDTH  # what the loop carries and nothing else
    assert all(way.residuals[0].moved == () for way in found)
    (moving,) = {way.residuals[0].moved for way in ways(program, device, moves=True)[:1]}
    assert moving


def test_a_step_without_loops_has_no_ways() -> None:
    program = trace(lambda x: jnp.sin(x), (np.ones(3, np.float32),), {}, {})
    assert ways(program, target_of("h200").device, moves=False) == []


@pytest.mark.slow
def test_a_scanned_step_runs_in_half_its_memory_here(tmp_path: Path) -> None:
    args = arrays()
    plain = memplan.jit(train).plan(*args).report.baseline_peak_bytes
    assert plain is not None
    step = memplan.jit(train, budget=plain // 2, verify="numbers")
    planned = step.plan(*args)
    assert planned.report.planner == "loops"
    assert planned.report.compiled_peak_bytes is not None and planned.report.compiled_peak_bytes <= plain // 2
    assert planned.report.recomputed_flops > 0
    again = [row for row in planned.report.decisions if row.decision == "recompute"]
    assert again and all(row.shape[0] == 4 for row in again)
    for expected, found in zip(jax.jit(train)(*args), planned.compile()(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert planned.plan is not None
    planned.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == planned.plan
    followed = memplan.jit(train, budget=plain // 2, plan=loaded).plan(*args)
    assert followed.report.compiled_peak_bytes == planned.report.compiled_peak_bytes
    with pytest.raises(memplan.PlanMismatchError):
        memplan.jit(train, budget=plain // 2, plan=loaded).plan(*arrays(batch=128))


def test_believing_the_planner_finds_residuals_too() -> None:
    report = memplan.jit(train, budget="250MiB", device="h200", verify=None).plan(*SHAPES).report
    assert (report.planner, report.compiled_peak_bytes) == ("loops", None)
    assert report.predicted_peak_bytes <= 250 * 2**20


@needs_compiler
@pytest.mark.gpu_aot
def test_a_scanned_step_fits_a_quarter_of_its_memory() -> None:
    plain = memplan.jit(train, device="h200", donate_argnums=0).plan(*SHAPES).report.baseline_peak_bytes
    assert plain is not None
    report = memplan.jit(train, budget=plain * 2 // 5, device="h200", donate_argnums=0).plan(*SHAPES).report
    assert report.planner == "loops"
    assert report.compiled_peak_bytes is not None and report.compiled_peak_bytes <= plain * 2 // 5
    assert abs(report.compiled_peak_bytes / report.predicted_peak_bytes - 1) < 0.1
    assert report.floor_bytes is not None and report.floor_bytes <= report.compiled_peak_bytes


@needs_compiler
@pytest.mark.gpu_aot
def test_stacks_on_the_host_take_host_memory_and_arrive_ahead() -> None:
    def carried_on_host(loop: Loop) -> Residuals:
        return Residuals((), tuple(set(loop.body.inputs) - loop.given))

    layers, width, batch = 6, 8192, 2048  # so much work that the link can keep up
    shapes = (
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((batch, width), jnp.float32),
    )
    target = target_of("h200")
    program = trace(train, shapes, {}, {"donate_argnums": 0})
    moving = with_residuals(program, carried_on_host)
    compiled = target.compile(as_step(moving, moving.jaxpr), shapes, {}, program.options)
    stacks = layers * 4 * batch * width
    assert moved_nbytes(*moving.loops[0]) == stacks
    assert compiled.memory.host_bytes == stacks
    (nearest, *_) = ways(program, target.device, moves=False)
    kept = target.compile(as_step(nearest, nearest.jaxpr), shapes, {}, program.options)
    assert (
        compiled.memory.device_bytes <= kept.memory.device_bytes - stacks + 5 * 4 * batch * width
    )  # slices on their way
    found = traffic(compiled.text, target.device)
    assert found.hidden_copy_s >= 0.8 * found.copy_s > 0
    # read at an index known only when it runs: what openxla/xla#46231 mends is an index that XLA derives
    reads = re.findall(r"dynamic-slice-start\S* = .*S\(5\).* kind=(k\w+)", compiled.text)
    assert reads and set(reads) == {"kLoop"}
