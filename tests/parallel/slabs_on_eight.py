"""Plans ring attention for less than a device's scores, over eight CPU devices; prints JSON."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import memplan
from memplan.planning.slabs.slabs import Slabs
from tests.parallel.rings import ring_shapes, ring_step, scores_nbytes

MESH = Mesh(np.array(jax.devices()), ("d",))
TOKENS = 1024


def arguments() -> Any:
    leaves, tree = jax.tree.flatten(ring_shapes(MESH, TOKENS))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(
        [
            jax.device_put(jax.random.normal(key, leaf.shape), leaf.sharding)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )


def in_slabs(check_vma: bool) -> dict[str, Any]:
    """Compare the step in slabs, and as its saved plan says, with `jax.jit`."""
    step, args = ring_step(MESH, check_vma), arguments()
    expected = jax.jit(step)(*args)
    # without slabs, the backward pass takes four times the scores
    planned = memplan.jit(step, budget=3 * scores_nbytes(TOKENS))
    results = planned(*args)
    plan = planned.plan(*args)
    with tempfile.TemporaryDirectory() as folder:
        plan.plan.save(Path(folder) / "plan.json")
        saved = memplan.Plan.load(Path(folder) / "plan.json")
    followed = memplan.jit(step, plan=saved)
    again = followed(*args)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True)
    same = zip(jax.tree.leaves(results), jax.tree.leaves(again), strict=True)
    report = plan.report
    return {
        "depths": [len(t.inside) for t in plan.plan.transforms if isinstance(t, Slabs)],
        "within": report.compiled_peak_bytes / report.budget_bytes,
        "predicted": report.predicted_peak_bytes / report.compiled_peak_bytes,
        "off": max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs),
        "followed": all(bool(jnp.array_equal(a, b)) for a, b in same),
    }


if __name__ == "__main__":
    print(json.dumps({str(check_vma): in_slabs(check_vma) for check_vma in (True, False)}))
