"""Is every step right? Compares each step over many processes with the same step on one device.

    WORKER="python -m experiments.distributed.every_step.worker"
    memplan launch -n 3 --devices 4 -- $WORKER --mesh 3x4 --steps 200

Both start from the same state. In a whole training, a sum that is wrong now and then, or on one
rank, would go unnoticed.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memplan
from memplan import parallel
from memplan.program.trace import trace
from memplan.verify.numbers import compare, in_pieces, nudged
from models.resnet import ResNetConfig
from models.train import Built, decoder_step, resnet_step, unet2d_step
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig

WIDTH = 130  # Not divisible by any number of devices here.
CLASSES = 10
ROUNDING = 1e-3  # Allowed error relative to a leaf's largest magnitude: sums in another order.
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
PIECES = (5, 12)  # Equations per piece, where a network's step is compiled in pieces.
NUDGED = 8  # Perturbed states that a network's step is run from where it looks wrong.


def hidden(params: Any, x: jax.Array) -> jax.Array:
    """Two layers normalized by the statistics of the whole batch.

    The activation is smooth: one value within rounding of a ReLU's kink would change a gradient by
    more than the allowed error.
    """
    for name in ("first", "second"):
        x = x @ params[name]
        x = jax.nn.silu((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3))
    return x


def classified(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    logits = hidden(params, batch["x"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def contrasted(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    """Contrastive loss of every example against the whole global batch."""
    views = hidden(params, batch["x"]), hidden(params, batch["x"][:, ::-1])
    first, second = (view / jnp.linalg.norm(view, axis=1, keepdims=True) for view in views)
    return optax.softmax_cross_entropy_with_integer_labels(
        10 * first @ second.T, jnp.arange(first.shape[0])
    ).mean()


def dropped(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    """Dropout and noise from a key per example."""

    def noisy(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0) + 0.1 * jax.random.normal(
            key, x.shape
        )

    x = jax.vmap(noisy)(jax.random.split(key, batch["x"].shape[0]), batch["x"])
    return classified(params, key, {**batch, "x": x})


def unet(rows: int) -> Built:
    """Instance norm, and a soft Dice loss that sums over the whole batch."""
    return unet2d_step(16, rows, UNet2DConfig(levels=2, filters=8), concrete=True)


def resnet(rows: int) -> Built:
    """Batch norm over the global batch, with running statistics."""
    optimizer, config = optax.sgd(0.01, momentum=0.9), ResNetConfig(depth=14, filters=8, classes=10)
    return resnet_step(32, rows, config=config, optimizer=optimizer, concrete=True)


def decoder(rows: int) -> Built:
    """Attention, embedding by index, AdamW."""
    return decoder_step(
        2, 32, rows, 16, config=DecoderConfig(vocab=64, context=16, heads=2), concrete=True
    )


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, used = jax.random.split(state["key"])
        value, gradient = jax.value_and_grad(loss)(state["params"], used, batch)
        updates, opt_state = OPTIMIZER.update(gradient, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": value}

    return step


def initial_state() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH), "out": (WIDTH, CLASSES)}
    params = {
        name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params), "key": jax.random.key(7)}


def batch_of(number: int, rows: int) -> Any:
    """The global batch of a step, the same in every process."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "label": rng.integers(0, CLASSES, rows).astype(np.int32)}


@dataclass(frozen=True)
class Case:
    """A step, and the options of `data_parallel` for it."""

    make: Callable[[int], Built]  # from the rows of the global batch
    options: Mapping[str, Any] = field(default_factory=dict)
    # (step, rows) -> batch; None: always the first one
    batch: Callable[[int, int], Any] | None = None


def _of(loss: Callable[..., jax.Array], **options: Any) -> Case:
    """The case of a loss `(params, key, batch)`."""
    return Case(
        lambda rows: (step_of(loss), (initial_state(), batch_of(0, rows))), options, batch_of
    )


LAYERS = {
    "batch norm": _of(classified), "contrastive": _of(contrasted), "typed keys": _of(dropped),
    "split state": _of(contrasted, split_state="opt_state"),
}  # fmt: skip
NETWORKS = {
    **{make.__name__: Case(make) for make in (unet, resnet, decoder)},
    **{
        f"{make.__name__}, split state": Case(make, {"split_state": "opt_state"})
        for make in (unet, resnet, decoder)
    },
}
CASES = {**LAYERS, **NETWORKS}


def wrong_steps(case: Case, mesh: Any, steps: int) -> tuple[int, float]:
    """The number of wrong steps in this process, and the worst error over the allowed error."""
    rows, count, process = 4 * mesh.size, jax.process_count(), jax.process_index()
    step, (state, batch) = case.make(rows)
    batch = jax.tree.map(np.asarray, batch)
    jaxpr = trace(step, (state, batch), {}, {}).jaxpr
    pieces = [] if case.batch else [in_pieces(jaxpr, length, {}) for length in PIECES]
    plain, divided = jax.jit(step), parallel.data_parallel(step, mesh, **case.options)
    run, whole = memplan.jit(divided), jax.jit(lambda tree: tree, out_shardings=divided.whole)
    state = divided.place(state)
    wrong, worst = 0, 0.0
    for number in range(steps):
        batch = case.batch(number, rows) if case.batch else batch
        mine = jax.tree.map(
            lambda leaf: leaf[process * rows // count : (process + 1) * rows // count], batch
        )
        before = local_copy(whole(state))
        state, metrics = run(state, divided.assemble(mine))
        actual, expected = local_copy(whole((state, metrics))), plain(before, batch)
        cut = [run_pieces(jax.tree.leaves((before, batch))) for run_pieces in pieces]
        off = difference(actual, expected, cut)
        if off > 1 and pieces:  # maybe a value within rounding of a kink
            draw = np.random.default_rng(number)
            states = (
                jax.tree.map(lambda leaf: nudged(leaf, draw), before)  # noqa: B023
                for _ in range(NUDGED)
            )
            off = difference(
                actual,
                expected,
                [*cut, *(jax.tree.leaves(plain(start, batch)) for start in states)],
            )
        wrong, worst = wrong + (not off <= 1), max(worst, off)
    return wrong, worst


def local_copy(tree: Any) -> Any:
    """This process's copies of arrays that every device holds whole."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def difference(actual: Any, expected: Any, cut: Sequence[Sequence[Any]]) -> float:
    """The largest error over the allowed error; NaN where a result is NaN."""
    ours, theirs = ([*map(_raw, jax.tree.leaves(tree))] for tree in (actual, expected))
    # Where a softmax cancels a bias's gradient, only rounding is left; pieces differ as much.
    leaves = compare(theirs, cut[0], ours, *cut[1:]).leaves if cut else ()
    allowed = [max(ROUNDING, leaf.tolerance) for leaf in leaves] or [ROUNDING] * len(ours)
    return max(_error(*leaf) for leaf in zip(ours, theirs, allowed, strict=True))


def _raw(leaf: Any) -> np.ndarray:
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def _error(actual: np.ndarray, expected: np.ndarray, allowed: float) -> float:
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(actual, expected) else np.inf
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-6)) / allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mesh", default="", help="sizes of the axes, as 3x4; by default processes x devices"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    cluster = parallel.initialize()
    sizes = [int(size) for size in options.mesh.split("x")] if options.mesh else []
    mesh = parallel.mesh({f"level{i}": size for i, size in enumerate(sizes)} or None)
    for name in options.cases:
        wrong, worst = wrong_steps(CASES[name], mesh, options.steps)
        labels = {
            "case": name,
            "mesh": options.mesh,
            "rank": cluster.process,
            "steps": options.steps,
        }
        print(json.dumps({**labels, "wrong": wrong, "worst": round(worst, 4)}), flush=True)


if __name__ == "__main__":
    main()
