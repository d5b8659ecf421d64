"""Is every step right? Each one over many processes against the same step on one device, from the same state.

    memplan launch -n 3 --devices 4 -- python -m experiments.distributed.every_step.worker --mesh 3x4 --steps 200

A sum that is wrong now and then, or on one rank, hides in a training that goes on from it: here it cannot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memplan import parallel

WIDTH = 130  # 130 x 130 floats are more than the 64 KiB that messages are compressed from, and fall into no equal parts
CLASSES = 10
ROUNDING = 1e-3  # of the largest magnitude of a leaf: one step's sums in another order
COMPRESSED = 0.05  # of the norm of an update: bfloat16 keeps 8 bits, and what was left out last time comes on top
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def hidden(params: Any, x: jax.Array) -> jax.Array:
    """Two layers with the statistics of the whole batch.

    Smooth ones: of a ReLU, one value within rounding of its kink moves a gradient by more than what is allowed.
    """
    for name in ("first", "second"):
        x = x @ params[name]
        x = jax.nn.silu((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3))
    return x


def classified(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    logits = hidden(params, batch["x"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def contrasted(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    """Every example against all others of the global batch."""
    first, second = (one / jnp.linalg.norm(one, axis=1, keepdims=True) for one in _views(params, batch["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(10 * first @ second.T, jnp.arange(first.shape[0])).mean()


def _views(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return hidden(params, x), hidden(params, x[:, ::-1])


def dropped(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    """Every example draws from a key of its own."""

    def one(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0) + 0.1 * jax.random.normal(key, x.shape)

    x = jax.vmap(one)(jax.random.split(key, batch["x"].shape[0]), batch["x"])
    return classified(params, key, {**batch, "x": x})


@dataclass(frozen=True)
class Case:
    """A loss `(params, key, batch)`, and options of `data_parallel`."""

    loss: Callable[..., jax.Array]
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "batch norm": Case(classified),
    "contrastive": Case(contrasted),
    "typed keys": Case(dropped),
    "split state": Case(contrasted, {"split_state": "opt_state"}),
    "compressed": Case(contrasted, {"compress": "bfloat16"}),
}


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, used = jax.random.split(state["key"])
        value, gradient = jax.value_and_grad(loss)(state["params"], used, batch)
        updates, opt_state = OPTIMIZER.update(gradient, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": value}

    return step


def begun() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH), "out": (WIDTH, CLASSES)}
    params = {name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "key": jax.random.key(7)}


def batch_of(number: int, rows: int) -> Any:
    """The same for every process."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "label": rng.integers(0, CLASSES, rows).astype(np.int32)}


def wrong_steps(case: Case, mesh: Any, steps: int) -> tuple[int, float]:
    """How many steps are wrong on this process, and the worst difference in units of what is allowed."""
    plain = jax.jit(step_of(case.loss))
    divided = parallel.data_parallel(step_of(case.loss), mesh, **case.options)
    run, whole = jax.jit(divided), jax.jit(lambda tree: tree, out_shardings=divided.whole)
    rows, count, process = 4 * mesh.size, jax.process_count(), jax.process_index()
    first = batch_of(0, rows)
    state = divided.place(begun(), first)[0] if "compress" in case.options else divided.place(begun())
    wrong, worst = 0, 0.0
    for number in range(steps):
        batch = batch_of(number, rows)
        mine = jax.tree.map(lambda leaf: leaf[process * rows // count : (process + 1) * rows // count], batch)
        before = here(whole(inner(state)))
        state, metrics = run(state, divided.assemble(mine))
        off = difference(before, here(whole((inner(state), metrics))), plain(before, batch), case)
        wrong, worst = wrong + (not off <= 1), max(worst, off)
    return wrong, worst


def inner(state: Any) -> Any:
    return getattr(state, "state", state)


def here(tree: Any) -> Any:
    """What this process has of arrays that every device has whole."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def difference(before: Any, found: Any, expected: Any, case: Case) -> float:
    """In units of what is allowed; not a number where a result is none."""
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    if "compress" in case.options:
        old, new, wanted = map(_weights, (before, found[0], expected[0]))
        return float(np.linalg.norm(new - wanted) / np.linalg.norm(wanted - old)) / COMPRESSED
    return max(_leaf(*map(_raw, pair)) for pair in pairs)


def _weights(state: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state["params"])])


def _raw(leaf: Any) -> np.ndarray:
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def _leaf(found: np.ndarray, expected: np.ndarray) -> float:
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(found, expected) else np.inf
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6)) / ROUNDING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="", help="sizes of the axes, as 3x4; by default processes x devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    cluster = parallel.initialize()
    sizes = [int(size) for size in options.mesh.split("x")] if options.mesh else []
    mesh = parallel.mesh({f"level{i}": size for i, size in enumerate(sizes)} or None)
    for name in options.cases:
        wrong, worst = wrong_steps(CASES[name], mesh, options.steps)
        told = {"case": name, "mesh": options.mesh, "rank": cluster.process, "steps": options.steps}
        print(json.dumps({**told, "wrong": wrong, "worst": round(worst, 4)}), flush=True)


if __name__ == "__main__":
    main()
