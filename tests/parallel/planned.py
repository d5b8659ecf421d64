"""A data-parallel training within a share of its bytes; prints the plan and the results as JSON.

memplan launch -n 2 --devices 1 -- python tests/parallel/planned.py --share 0.6
"""

import argparse
import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from memplan.parallel.cluster import initialize
from memplan.parallel.meshes import mesh
from memplan.parallel.step import data_parallel

WIDTH, LAYERS, ROWS = 64, 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument(
        "--split", action="store_true", help="each process has a part of every array of the state"
    )
    parser.add_argument("--odd", type=int, default=-1, help="the rank that takes another step")
    options = parser.parse_args()
    initialize()
    active = jnp.sin if jax.process_index() == options.odd else jnp.tanh
    step = data_parallel(step_of(active), mesh(), split_state=lambda path, leaf: options.split)
    state = step.place({"w": [jnp.eye(WIDTH) + number / 100 for number in range(LAYERS)]})
    batches = [step.assemble(rows(seed)) for seed in range(3)]
    unplanned = memplan.jit(step)
    whole = unplanned.plan(state, batches[0]).report.baseline_peak_bytes
    fit = memplan.jit(step, budget=int(options.share * whole), verify="numbers")
    plan_stage = fit.plan(state, batches[0])
    runs = {"by jax": jax.jit(step), "unplanned": unplanned, "planned": fit}
    trained = {name: train(run, state, batches) for name, run in runs.items()}
    actions = hashlib.sha256(plan_stage.plan.to_json().encode()).hexdigest()
    report = plan_stage.report
    plan = {"fingerprint": plan_stage.plan.fingerprint, "plan": actions}
    sizes = {"peak": report.compiled_peak_bytes, "budget": report.budget_bytes}
    facts = {"rank": jax.process_index(), **plan, **trained, **sizes}
    sys.stdout.write(json.dumps(facts) + "\n")


def train(step: Any, state: Any, batches: list[Any]) -> dict[str, Any]:
    """The losses, and a digest of this process's part of the last state."""
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    parts = (part.data for leaf in jax.tree.leaves(state) for part in leaf.addressable_shards)
    digest = hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in parts))
    return {"losses": losses, "state": digest.hexdigest()}


def rows(seed: int) -> np.ndarray:
    return (
        np.random.default_rng([seed, jax.process_index()])
        .normal(size=(ROWS, WIDTH))
        .astype(np.float32)
    )


def step_of(active: Any) -> Any:
    def train_step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = active(y @ weight)
            return jnp.mean(y**2)

        value, slopes = jax.value_and_grad(loss)(state["w"])
        return {
            "w": [weight - 0.1 * slope for weight, slope in zip(state["w"], slopes, strict=True)]
        }, value

    return train_step


if __name__ == "__main__":
    main()
