"""Compares a step in slabs on four CPU devices with one device; prints JSON."""

import json
from typing import Any

import jax
import numpy as np

import memplan
from memplan import parallel

SHARES = (0.4, 0.3)


def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.lax.conv_general_dilated(
            x, weight, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        )
        mean = x.mean((1, 2, 3), keepdims=True)
        variance = x.var((1, 2, 3), keepdims=True)
        x = jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5))
    return (x**2).mean()


def step(weights: list[jax.Array], x: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return [
        weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)
    ], loss


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    weights = [
        rng.normal(size=(3, 3, 3, a, 8)).astype(np.float32) / (27 * a) ** 0.5 for a in (1, 8, 8)
    ]
    x = rng.normal(size=(2, 16, 64, 16, 1)).astype(np.float32)
    mesh = parallel.mesh({"host": 2, "device": 2})
    divided = parallel.data_parallel(step, mesh, space={"host": "batch", "device": "depth"})
    args = divided.place(weights), divided.assemble(x)
    whole = memplan.jit(divided).plan(*args).report.compiled_peak_bytes
    expected = jax.tree.leaves(jax.device_get(jax.jit(step)(weights, x)))
    rows = []
    for share in SHARES:
        planned = memplan.jit(divided, budget=int(share * whole), topology="2x2").plan(*args)
        results = jax.tree.leaves(jax.device_get(planned.compile()(*args)))
        report = planned.report
        pairs = zip(results, expected, strict=True)
        off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        kinds = sorted({row.kind for row in report.mesh.collectives})
        share = report.compiled_peak_bytes / whole
        rows.append({"share": share, "loops": len(report.slab_loops), "kinds": kinds, "off": off})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
