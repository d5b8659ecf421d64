"""Memory as XLA's GPU runtime has it, on the stand-in driver: state on the host, pools, peaks, none left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.errors import OutOfMemoryError
from memplan.results import execute
from memplan.xla.local import Pool
from tests.gpu_runtime import stand_in

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        stand_in.missing() is not None, reason=f"no stand-in driver: {stand_in.missing()}"
    ),
]
MIB = 1 << 20


def loss(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.sin(jnp.tanh(x @ weight))
    return (x * x).mean()


def train(weights: Any, momentum: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value


def kind_of(tree: Any) -> str:
    (kind,) = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}
    return kind


def twenty_steps(host_state: int | list[int]) -> dict[str, Any]:
    width = 512  # 1 MiB a leaf
    weights = [jax.random.normal(jax.random.key(n), (width, width)) / width**0.5 for n in range(2)]
    momentum, x = jax.tree.map(jnp.zeros_like, weights), jnp.ones((4, width))
    # in its own memory, as far as the user knows
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = memplan.jit(train, donate_argnums=(0, 1), host_state=host_state, out_shardings=device)
    planned = step.plan(weights, momentum, x)
    state = (
        planned.place(jax.tree.map(jnp.copy, weights), 0),
        planned.place(jax.tree.map(jnp.copy, momentum), 1),
    )
    before, plain, expected = jax.tree.leaves(state), jax.jit(train), (weights, momentum)
    used = []
    for _ in range(20):
        *state, value = step(*state, x)
        *expected, wanted = plain(*expected, x)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        used.append(jax.local_devices()[0].memory_stats()["bytes_in_use"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        list(state),
        list(expected),
    )
    assert step.plan(*state, x) is planned
    assert all(leaf.is_deleted() for leaf in before)
    with pytest.raises(memplan.MemplanError, match=r"pass those that Planned\.place\(\)"):
        step(*jax.device_put((weights, momentum, x), jax.devices()[0]))
    return {"kinds": list(map(kind_of, state)), "growth": used[-1] - used[1]}


@pytest.mark.parametrize(
    ("held", "kinds"),
    [
        (1, ["device", "pinned_host"]),
        pytest.param([0, 1], ["pinned_host"] * 2, marks=pytest.mark.slow),
    ],
)
def test_state_goes_round_on_the_host(held: int | list[int], kinds: list[str]) -> None:
    ran = stand_in.run(twenty_steps, held)
    assert ran.value == {"kinds": kinds, "growth": 0}


def requests(sizes: list[int], kind: str) -> list[int]:
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    arrays = [jax.device_put(np.zeros(nbytes, np.uint8), sharding) for nbytes in sizes]
    jax.block_until_ready(arrays)
    stats = device.memory_stats()
    return [stats["bytes_in_use"], stats["pool_bytes"], stats["bytes_limit"]]


@pytest.mark.slow
@pytest.mark.parametrize("grows", [True, False])
def test_a_devices_pool_takes_what_the_model_says(grows: bool) -> None:
    sizes = [int(nbytes) for nbytes in np.random.default_rng(3).integers(1, 90 * MIB, 24)]
    ran = stand_in.run(
        requests,
        sizes,
        "device",
        execute=False,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": str(not grows).lower()},
    )
    in_use, pool, limit = ran.value
    usage = Pool(limit, grows).take(sizes)
    assert (usage.in_use_bytes, usage.pool_bytes, usage.refused_nbytes) == (in_use, pool, None)


@pytest.mark.slow
def test_the_pinned_pool_takes_what_the_model_says() -> None:
    sizes = [int(nbytes) for nbytes in np.random.default_rng(4).integers(1, 30 * MIB, 16)]
    ran = stand_in.run(requests, sizes, "pinned_host", execute=False)
    regions = sum(int(words[4]) for words in ran.lines() if words[2] == "HOSTALLOC")
    assert regions == Pool(64 << 30, grows=True).take(sizes).pool_bytes


def wide(layers: int = 16, width: int = 1024, rows: int = 16384) -> tuple[Any, Any, jax.Array]:
    weights = [jnp.zeros((width, width)) for _ in range(layers)]
    return weights, jax.tree.map(jnp.zeros_like, weights), jnp.zeros((rows, width))


def out_of_memory(budget: str, pinned_nbytes: int, hole_nbytes: int) -> dict[str, Any]:
    """A step's first call, where so much is pinned already, and the pool has a hole before its last array."""
    execute._PATIENCE_S = 0.5
    device = jax.local_devices()[0]
    weights, momentum, x = wide()
    hole = jnp.zeros(hole_nbytes, jnp.uint8)
    batch = jnp.copy(x).block_until_ready()
    hole.delete()
    del x
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pinned = (
        jax.device_put(np.zeros(pinned_nbytes, np.uint8), sharding).block_until_ready()
        if pinned_nbytes
        else None
    )
    step = memplan.jit(train, donate_argnums=(0, 1), budget=budget)
    planned = step.plan(weights, momentum, batch)
    temp_bytes = planned._outcome.executable.memory.temp_bytes
    facts: dict[str, Any] = {"host_bytes": planned.report.host_peak_bytes, "temp_bytes": temp_bytes}
    try:
        jax.block_until_ready(step(weights, momentum, batch))
    except OutOfMemoryError as error:
        facts |= {"message": str(error), "needed": error.needed_bytes, "free": error.free_bytes}
        facts["cause"] = repr(
            error.__cause__ or (not error.__suppress_context__ and error.__context__) or None
        )
    del pinned
    return facts | {"deleted": sum(leaf.is_deleted() for leaf in [*weights, *momentum])}


@pytest.mark.slow
def test_a_hole_in_the_pool_is_told_before_the_step_takes_its_arguments() -> None:
    hole = 800 * MIB
    facts = stand_in.run(out_of_memory, "60%", 0, hole, execute=False, device_mib=2500).value
    assert facts["needed"] == facts["temp_bytes"] > facts["free"] == hole
    assert facts["deleted"] == 0 and "not started" in facts["message"] and facts["cause"] == "None"


@pytest.mark.slow
def test_a_full_pinned_pool_is_told_with_the_line_that_raises_it() -> None:
    limit = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}
    ran = stand_in.run(
        out_of_memory, "70%", 900 * MIB, 0, execute=False, device_mib=2500, env=limit
    )
    facts = ran.value
    assert facts["needed"] == facts["host_bytes"] > (1024 - 900) * MIB and facts["cause"] == "None"
    assert f"{facts['deleted']} of its 32 donated arguments are lost" in facts["message"]
    assert "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2 or more" in facts["message"]


def several_calls() -> dict[str, Any]:
    weights, momentum, x = wide(layers=4, width=64, rows=2048)
    x = np.asarray(x) + 1  # which jax copies to the device: no argument is counted twice
    weights = [weight + 0.01 for weight in weights]
    step = memplan.jit(train, budget="1GiB")
    planned = step.plan(weights, momentum, x)
    first = jax.block_until_ready(step(weights, momentum, x))
    report = planned.report
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(step, weights, momentum, x) for _ in range(12)]
    with pytest.raises(TypeError):
        step(weights, momentum, x[:, :-1])
    for result in [*(future.result() for future in futures), step(weights, momentum, x)]:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), first, result)
    jax.device_put(
        np.zeros(16 * MIB, np.uint8)
    ).block_until_ready()  # more than the next step takes
    later = memplan.jit(train, budget="1GiB").plan(weights, momentum, x)
    later.compile()(weights, momentum, x)
    return {
        "observed": report.observed_peak_bytes,
        "pool": report.pool_peak_bytes,
        "compiled": report.compiled_peak_bytes,
        "later": later.report.observed_peak_bytes,
    }


def test_the_observed_peak_is_the_steps_and_threads_may_call() -> None:
    facts = stand_in.run(several_calls).value
    assert facts["later"] is None
    assert facts["compiled"] <= facts["observed"] and abs(facts["observed"] - facts["pool"]) < 4096
