"""Training steps over eight CPU devices and on one, in a process of its own; prints JSON.

The results show that a step over a mesh trains as on one device, that plans fit, and the shardings.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memplan
from memplan import parallel
from models.resnet import ResNetConfig
from models.train import decoder_step, resnet_step, unet2d_step
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig

MESH = parallel.mesh({"host": 2, "device": 4})
RESNET = ResNetConfig(depth=14, filters=8, classes=10)
SGD = optax.sgd(0.01, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-3))
STEPS = 3


def unet() -> Any:
    return unet2d_step(16, 8, UNet2DConfig(levels=2, filters=8), CLIPPED, concrete=True)


def resnet() -> Any:
    return resnet_step(32, 16, config=RESNET, optimizer=SGD, concrete=True)


def large_resnet() -> Any:
    return resnet_step(128, 8, config=RESNET, optimizer=SGD, concrete=True)


def decoder() -> Any:
    config = DecoderConfig(vocab=64, context=16, heads=2)
    return decoder_step(2, 32, 8, 16, config=config, optimizer=CLIPPED, concrete=True)


def small(step: Callable[..., Any]) -> Any:
    """One of the steps below with its state and batch."""
    keys = jax.random.split(jax.random.key(4), 3)
    weight = jax.random.normal(keys[0], (16, 16)) / 4
    state = {"w": weight, "m": jnp.zeros((16, 16)), "key": keys[1]}
    return step, (state, jax.random.normal(keys[2], (32, 16)))


def updated(state: Any, gradient: jax.Array) -> Any:
    moment = 0.9 * state["m"] + gradient
    key = jax.random.split(state["key"], 1)[0]
    return {"w": state["w"] - 0.1 * moment, "m": moment, "key": key}


def dropped(state: Any, x: jax.Array) -> Any:
    """Dropout, by a key in the state."""

    def loss(w: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(state["key"], 0.5, x.shape)
        return (jnp.where(kept, jnp.tanh(x @ w), 0.0) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return updated(state, gradient), value


def accumulated(state: Any, x: jax.Array) -> Any:
    """Gradients of four microbatches, one after another."""

    def add(total: Any, part: jax.Array) -> Any:
        terms = jax.value_and_grad(lambda w: (jnp.tanh(part @ w) ** 2).mean())(state["w"])
        return jax.tree.map(jnp.add, total, terms), None

    parts = x.reshape(-1, 4, 16).swapaxes(0, 1)
    (value, gradient), _ = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros((16, 16))), parts)
    return updated(state, gradient / 4), value / 4


def looped(state: Any, x: jax.Array) -> Any:
    """Layers in a loop, a loop as long as the data say, and a choice by a global sum."""

    def loss(w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(lambda y, _: (jnp.tanh(y @ w), None)), x, length=6)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(state["w"])
    shrunk = jax.lax.while_loop(lambda g: (g**2).sum() > 0.01, lambda g: 0.5 * g, gradient)
    return updated(state, jax.lax.cond(x.sum() > 0, lambda g: g, lambda g: -g, shrunk)), value


def mixed(state: Any, x: jax.Array) -> Any:
    """Products in bfloat16 of whole numbers, exact in any order; the state in float32."""
    whole = jnp.round(x).astype(jnp.bfloat16)

    def loss(w: jax.Array) -> jax.Array:
        return (whole @ jnp.round(4 * w).astype(jnp.bfloat16)).astype(jnp.float32).mean() + (
            w**2
        ).mean()

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return updated(state, gradient), value


def off(a: Any, b: Any) -> float:
    """Largest relative difference of any leaf."""

    def leaf(x: Any, y: Any) -> float:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-3)) if x.size else 0.0

    return max(jax.tree.leaves(jax.tree.map(leaf, a, b)), default=0.0)


def trained(step: Callable[..., Any], state: Any, batch: Any) -> Any:
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    return state, metrics


def same(make: Callable[[], Any], **options: Any) -> float:
    step, (state, batch) = make()
    divided = parallel.data_parallel(step, MESH, **options)
    results = trained(jax.jit(divided), *divided.place(state, batch))
    return off(trained(jax.jit(step), state, batch), results)


def planned(make: Callable[[], Any], share: float) -> dict[str, Any]:
    step, (state, batch) = make()
    expected = trained(jax.jit(step), state, batch)
    divided = parallel.data_parallel(step, MESH)
    state, batch = divided.place(state, batch)
    memory = jax.jit(divided, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole = memplan.jit(divided, donate_argnums=0).plan(state, batch).report
    run = memplan.jit(
        divided, budget=int(share * (peak - memory.alias_size_in_bytes)), donate_argnums=0
    )
    report = run.plan(state, batch).report
    results = trained(run, state, batch)
    return {
        "off": off(expected, results),
        "planner": report.planner,
        "within": (report.compiled_peak_bytes or 0) / report.budget_bytes,
        "counted": [
            (row.predicted_peak_bytes or 0) - (row.compiled_peak_bytes or 0)
            for row in (whole, report)
        ],
        "same baseline": whole.baseline_peak_bytes
        == report.baseline_peak_bytes
        == whole.predicted_peak_bytes,
    }


def judged(make: Callable[[], Any], share: float) -> str:
    """The planner of a step over two hosts with sums in phases and compared numbers."""
    step, (state, batch) = make()
    divided = parallel.data_parallel(step, MESH)
    state, batch = divided.place(state, batch)
    whole = (
        memplan.jit(divided, topology="2x4", verify="numbers")
        .plan(state, batch)
        .report.compiled_peak_bytes
    )
    run = memplan.jit(
        divided, topology="2x4", verify="numbers", split=False, budget=int(share * (whole or 0))
    )
    return run.plan(state, batch).report.planner


def over_typed_mesh() -> dict[str, float]:
    """A mesh of jax with explicit axes: arrays that are placed on it, and others."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
            return jnp.where(kept, x @ w, 0.0).mean()

        return jax.value_and_grad(loss)(w)

    shapes = enumerate([(16, 6), (6, 6)])
    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in shapes)
    args = w, x
    expected = jax.jit(step)(*args)
    divided = parallel.data_parallel(step, jax.make_mesh(MESH.axis_sizes, MESH.axis_names))
    return {
        "placed": off(expected, jax.jit(divided)(*divided.place(*args))),
        "not placed": off(expected, jax.jit(divided)(*args)),
        "planned": off(expected, memplan.jit(divided)(*args)),
    }


def share_of_split_state() -> float:
    """One device's share of the optimizer's state."""
    step, (state, batch) = decoder()
    divided = parallel.data_parallel(step, MESH, split_state="opt_state")
    placed = divided.place(state)
    after, _ = jax.jit(divided)(placed, divided.assemble(batch))
    nbytes = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(after.opt_state)
    )
    return nbytes / sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))


def main() -> None:
    warnings.filterwarnings("error", "XLA cannot divide")
    split = {"split_state": "opt_state"}
    results = {
        "same": {
            "unet": same(unet),
            "resnet": same(resnet),
            "decoder": same(decoder),
            "unet, split state": same(unet, **split),
            "decoder, split state": same(decoder, **split),
            "unet, in space": same(unet, space={"host": "batch", "device": "depth"}),
            **{
                step.__name__: same(functools.partial(small, step))
                for step in (dropped, accumulated, looped, mixed)
            },
        },
        "planned": planned(large_resnet, 0.85),
        "judged": judged(unet, 0.85),
        "over typed mesh": over_typed_mesh(),
        "share of split state": share_of_split_state(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
