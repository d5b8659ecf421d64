"""Plans steps over meshes of eight CPU devices in a process of its own; prints JSON."""

import json
import os
import warnings
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import memplan
from tests.parallel.meshed_steps import AXES, CASES, MLP, Case, explicit, fsdp, mlp

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)


def filled(shapes: Any) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(
        [jax.random.normal(key, leaf.shape) / 8 for key, leaf in zip(keys, leaves, strict=True)]
    )


def placed(case: Case) -> Any:
    """The arguments' values with the case's shardings; with None, where jax puts them."""
    values = filled(case.shapes)
    return tuple(
        value if lies is None else jax.device_put(value, lies)
        for value, lies in zip(values, case.shardings, strict=True)
    )


def compared(step: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Compare the step, planned for 80 % of its unplanned bytes, with `jax.jit`."""
    expected = jax.jit(step, **options)(*args)
    whole = memplan.jit(step, **options).plan(*args).report.baseline_peak_bytes
    planned = memplan.jit(step, budget=whole * 8 // 10, **options)
    results = planned(*args)
    report = planned.plan(*args).report
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True))
    return {
        "planner": report.planner,
        "within": report.compiled_peak_bytes / report.budget_bytes,
        "predicted": report.predicted_peak_bytes / report.compiled_peak_bytes,
        "off": max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs),
        "placed": all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs),
    }


def in_context() -> dict[str, Any]:
    """Explicit axes of a mesh in the context: shardings are types of arrays."""
    mesh = explicit(MESH)
    with jax.set_mesh(mesh):
        case = fsdp(mesh)
        weights, x = (
            jax.device_put(array, lies)
            for array, lies in zip(filled(MLP), case.shardings, strict=True)
        )

        def step(weights: Any, x: jax.Array) -> Any:
            return mlp([jax.sharding.reshard(weight, PartitionSpec()) for weight in weights], x)

        return compared(step, (weights, x), {})


def by_pmap() -> dict[str, Any]:
    """The planned step calls jax.pmap."""
    weights, x = filled(MLP)

    def step(weights: Any, x: jax.Array) -> Any:
        each = jax.pmap(
            lambda w, rows: jax.lax.pmean(mlp(w, rows), "i"), axis_name="i", in_axes=(None, 0)
        )
        return jax.tree.map(lambda leaf: leaf[0], each(weights, x.reshape(8, -1, x.shape[1])))

    return compared(step, (weights, x), {})


def main() -> None:
    warnings.filterwarnings("error", "XLA cannot divide")
    rows = {}
    for name, make in CASES.items():
        case = make(MESH)
        rows[name] = compared(case.step, placed(case), case.options)
    rows["by one argument"] = compared(mlp, (filled(MLP)[0], placed(fsdp(MESH))[1]), {})
    print(json.dumps({**rows, "in context": in_context(), "by pmap": by_pmap()}))


if __name__ == "__main__":
    main()
