"""Training steps over eight CPU devices and on one, compiled; prints one JSON object. Run in a process of its own.

What one device runs is checked on simulated devices (`tests.parallel.emit`). This is about what only XLA and a real
mesh can show: that the collectives it compiles do that, that plans fit, and where arrays lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import memplan
from memplan import parallel
from models.resnet import ResNet, ResNetConfig
from models.train import TrainState, cross_entropy, decoder_step, resnet_step, unet2d_step
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


def off(a: Any, b: Any) -> float:
    """Largest difference over the largest magnitude of any leaf."""

    def leaf(x: Any, y: Any) -> float:
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
    found = trained(jax.jit(divided), *divided.place(state, batch))
    return off(trained(jax.jit(step), state, batch), found)


def planned(make: Callable[[], Any], share: float) -> dict[str, Any]:
    step, (state, batch) = make()
    expected = trained(jax.jit(step), state, batch)
    divided = parallel.data_parallel(step, MESH)
    state, batch = divided.place(state, batch)
    memory = jax.jit(divided, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    run = memplan.jit(divided, budget=int(share * (peak - memory.alias_size_in_bytes)), donate_argnums=0)
    report = run.plan(state, batch).report
    found = trained(run, state, batch)
    return {
        "off": off(expected, found),
        "planner": report.planner,
        "within": (report.compiled_peak_bytes or 0) / report.budget_bytes,
        "baseline": (report.baseline_peak_bytes or 0) - (peak - memory.alias_size_in_bytes),
    }


def own_statistics() -> dict[str, float]:
    """Batch norm of each device's own, against the customary way: the step on the part, its gradients averaged."""
    step, (state, batch) = resnet_step(32, 64, config=RESNET, optimizer=SGD, concrete=True)
    names = MESH.axis_names
    model = ResNet(RESNET)

    def local(state: TrainState, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
            return cross_entropy(logits, batch["label"]), changed["batch_stats"]

        found = jax.value_and_grad(loss, has_aux=True)(state.params)
        (value, statistics), gradient = jax.lax.pmean(found, names)
        updates, opt_state = SGD.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, statistics, opt_state), {"loss": value}

    whole, part = PartitionSpec(), PartitionSpec(names)
    usual = jax.jit(jax.shard_map(local, mesh=MESH, in_specs=(whole, part), out_specs=whole, check_vma=False))
    divided = parallel.data_parallel(step, MESH, statistics="device")
    return {
        "off": off(usual(state, batch), jax.jit(divided)(state, batch)),
        "from global": off(jax.jit(step)(state, batch), usual(state, batch)),
        "sums": len(divided.sums),
    }


def over_typed_mesh() -> dict[str, float]:
    """A mesh as jax makes it, whose arrays' types say how they lie on it: arrays that lie there, and others."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
            return jnp.where(kept, x @ w, 0.0).mean()

        return jax.value_and_grad(loss)(w)

    args = jax.random.normal(jax.random.key(1), (6, 6)), jax.random.normal(jax.random.key(0), (16, 6))
    expected = jax.jit(step)(*args)
    divided = parallel.data_parallel(step, jax.make_mesh(MESH.axis_sizes, MESH.axis_names))
    return {
        "placed": off(expected, jax.jit(divided)(*divided.place(*args))),
        "not placed": off(expected, jax.jit(divided)(*args)),
        "planned": off(expected, memplan.jit(divided)(*args)),
    }


def compressed() -> dict[str, Any]:
    """Twenty steps: what is left out of one message is in the next."""
    config = DecoderConfig(vocab=256, context=32, heads=2)
    step, (state, batch) = decoder_step(2, 64, 8, 32, config=config, concrete=True)
    divided = parallel.data_parallel(step, MESH, compress="bfloat16")
    placed, whole = divided.place(state, batch)
    run, plain = jax.jit(divided), jax.jit(step)
    for _ in range(20):
        placed, metrics = run(placed, whole)
        state, expected = plain(state, batch)
    return {"loss": float(metrics["loss"]) / float(expected["loss"]), "how": [one.how for one in divided.sums]}


def share_of_split_state() -> float:
    """Of the optimizer's state, what one device has."""
    step, (state, batch) = decoder()
    divided = parallel.data_parallel(step, MESH, split_state="opt_state")
    placed = divided.place(state)
    after, _ = jax.jit(divided)(placed, divided.assemble(batch))
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(after.opt_state))
    return here / sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))


def main() -> None:
    found = {
        "same": {
            "unet": same(unet),
            "resnet": same(resnet),
            "decoder": same(decoder),
            "unet, split state": same(unet, split_state="opt_state"),
            "decoder, split state": same(decoder, split_state="opt_state"),
            "decoder, not decomposed": same(decoder, decompose=False),
        },
        "planned": planned(large_resnet, 0.85),
        "own statistics": own_statistics(),
        "over typed mesh": over_typed_mesh(),
        "compressed": compressed(),
        "share of split state": share_of_split_state(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
