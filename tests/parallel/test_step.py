"""What users call: its arguments, its errors, and training steps on eight real devices, which one script runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from memplan.parallel.partition.sharded import Replicate, Shard
from tests.parallel.simulator.simulated import array, mesh

import memplan
from memplan.errors import MemplanError
from memplan.parallel.step import data_parallel

SAME = 3e-5  # what rounding does to these steps, three times over
W, X = array(6, 6, seed=1), array(24, 6)


def step(state: jax.Array, batch: jax.Array) -> jax.Array:
    return state - 0.1 * jax.grad(lambda w: ((batch @ w) ** 2).mean())(state)


def test_layouts_say_what_is_divided() -> None:
    divided = data_parallel(step, mesh((4,)), split_state="m")
    state = {"w": jnp.ones((6, 6)), "m": jnp.ones((6, 8)), "count": 1}
    batch = X, jnp.ones(())
    assert divided.layouts(state, batch) == [Replicate(), Shard(1), Replicate(), Shard(0), Replicate()]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: data_parallel(step, mesh((4,))).layouts(W, X[:6]), r"global batch of 6 \(.*Take 4 or 8"),
        (lambda: memplan.parallel.mesh({"host": 4, "device": 400}), r"needs 1600 devices; there are \d+ in 1 proc"),
        (lambda: data_parallel(step, mesh((8,)), topology="ddl"), "the mesh has a0"),
        (lambda: data_parallel(step, mesh((4,)), compress="int3"), "one of bfloat16, float16"),
        (lambda: data_parallel(step, mesh((4,)), compress="bfloat16", split_state="m"), "either split_state or comp"),
        (lambda: data_parallel(step, mesh((4,)), compress="bfloat16")(W, X), r"what place\(state, batch\) returns"),
        (lambda: data_parallel(step, mesh((4,)), statistics="none"), "'global' or 'device'"),
        (
            lambda: data_parallel(step, mesh((4,))).assemble(X),
            "an AbstractMesh has no devices",
        ),
    ],
)
def test_bad_input_is_told(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(MemplanError, match=told):
        call()


def test_sums_are_decomposed_once() -> None:
    flag = {"xla_gpu_all_reduce_blueconnect_num_devices_per_host": 4}
    here = data_parallel(step, jax.make_mesh((1,), ("device",)))
    with pytest.raises(MemplanError, match="already decomposes"):
        memplan.jit(here, compiler_options=flag).plan(W, X)


def test_a_mean_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("mean {}", x.mean())
        return w * x.sum()

    here = data_parallel(step, jax.make_mesh((1,), ("device",)))
    np.testing.assert_allclose(jax.jit(here)(W, X), W * X.sum(), rtol=1e-5)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1


def test_arguments_may_be_named() -> None:
    def step(state: jax.Array, batch: jax.Array, rate: float = 0.1, *, scale: float = 2.0) -> jax.Array:
        return state - rate * scale * (batch @ state).sum(0)

    divided = jax.jit(data_parallel(step, jax.make_mesh((1,), ("device",))))
    for args, kwargs in [((W,), {"batch": X}), ((W, X), {"rate": 0.5}), ((), {"state": W, "batch": X, "scale": 1.0})]:
        np.testing.assert_allclose(divided(*args, **kwargs), step(*args, **kwargs), rtol=1e-5)
    with pytest.raises(MemplanError, match=r"does not take these arguments: missing a required argument: 'batch'"):
        divided(W, bacth=X)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_step_over_a_mesh_is_compiled_for_a_like_mesh_of_described_gpus(axes: AxisType) -> None:
    shapes = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    of_eight = AbstractMesh((2, 4), ("host", "device"), axis_types=(axes, axes))
    divided = data_parallel(step, of_eight, topology="today@2x4", device="h100")
    planned = memplan.jit(divided, device="h100").plan(*shapes)
    memory = planned._found.executable.compiled.memory_analysis()
    nbytes = 4 * (2 * 128 * 128 + 256 * 128 // 8)
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes == nbytes


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """What `eight_devices.py` found."""
    script = Path(__file__).with_name("eight_devices.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_train_as_one_does(on_eight: Any) -> None:
    assert max(on_eight["same"].values()) < SAME, on_eight["same"]
    assert max(on_eight["over typed mesh"].values()) < SAME, on_eight["over typed mesh"]


@pytest.mark.slow
def test_a_divided_step_is_planned_as_one_device_runs_it(on_eight: Any) -> None:
    planned = on_eight["planned"]
    assert planned["planner"] == "kernels"
    assert 0 <= planned["baseline"] <= 1024  # tables of pointers, which XLA:CPU packs more tightly than is counted
    assert planned["within"] <= 1
    assert planned["off"] < SAME


@pytest.mark.slow
def test_statistics_of_each_devices_own_are_those_of_the_customary_way(on_eight: Any) -> None:
    own = on_eight["own statistics"]
    assert own["off"] < SAME < own["from global"]
    assert own["sums"] <= 6


@pytest.mark.slow
def test_compressed_sums_remember_what_they_left_out(on_eight: Any) -> None:
    assert on_eight["compressed"]["loss"] == pytest.approx(1, abs=1e-4)
    assert any("bfloat16" in how for how in on_eight["compressed"]["how"])


@pytest.mark.slow
def test_each_device_keeps_its_part_of_divided_state(on_eight: Any) -> None:
    assert on_eight["share of split state"] == pytest.approx(1 / 8, rel=0.01)
