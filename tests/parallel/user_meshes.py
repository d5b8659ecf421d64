"""Plans steps over four devices of this machine; prints one JSON object. To be run in a process of its own."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import memplan

MESH = Mesh(np.array(jax.devices()), ("d",))
SPLIT, WHOLE = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("d",), ()))
W = jax.random.normal(jax.random.key(0), (64, 64)) / 8
X = jax.random.normal(jax.random.key(1), (4096, 64))


def train(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        hidden = x
        for _ in range(8):
            hidden = jnp.sin(hidden @ w)
        return (hidden**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def constrained(w: jax.Array, x: jax.Array) -> Any:
    return train(w, jax.lax.with_sharding_constraint(2 * x, SPLIT))


def dropped(w: jax.Array, x: jax.Array) -> Any:
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    mean = jax.shard_map(
        lambda part: jax.lax.pmean(part.sum(), "d"), mesh=MESH, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    return train(w, jnp.where(mask, x, 0)), mean(x)


def tried(step: Any, args: Any, **options: Any) -> dict[str, Any]:
    plain = jax.jit(step, **options)
    expected, memory = plain(*args), plain.lower(*args).compile().memory_analysis()
    whole = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    planned = memplan.jit(step, budget=whole * 7 // 10, **options)
    found, report = planned(*args), planned.plan(*args).report
    return {
        "planner": report.planner,
        "baseline": report.baseline_peak_bytes == whole,
        "within": report.compiled_peak_bytes / report.budget_bytes,
        "predicted": report.predicted_peak_bytes / report.compiled_peak_bytes,
        "same": jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5)), expected, found)),
        "placed": [a.sharding for a in jax.tree.leaves(found)] == [a.sharding for a in jax.tree.leaves(expected)],
    }


if __name__ == "__main__":
    placed = jax.device_put(W, WHOLE), jax.device_put(X, SPLIT)
    print(
        json.dumps(
            {
                "by arguments": tried(train, placed),
                "by one argument": tried(train, (W, placed[1])),
                "by in_shardings": tried(train, (W, X), in_shardings=(WHOLE, SPLIT), out_shardings=(SPLIT, WHOLE)),
                "by a constraint": tried(constrained, (W, X)),
                "by shard_map": tried(dropped, placed),
            }
        )
    )
