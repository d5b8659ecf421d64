"""Runs steps over eight CPU devices and one; prints one JSON object. To be run in a process of its own."""

from __future__ import annotations

import json
import os
import warnings
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


def function(step: Callable[..., Any], batch: Any, **options: Any) -> dict[str, Any]:
    """A step without state, over the mesh and on one device."""
    weights = jax.random.normal(jax.random.key(1), (6, 6))
    divided = parallel.data_parallel(step, MESH, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        text = jax.jit(divided).lower(weights, batch).as_text()
        found = jax.jit(divided)(weights, batch)
    return {
        "off": off(jax.jit(step)(weights, batch), found),
        "told": [str(one.message) for one in told if "divided" in str(one.message)],
        "sums": [one.terms for one in divided.sums],
        "gathers": text.count("all_gather"),
        "split": not jax.tree.leaves(found)[0].sharding.is_fully_replicated,
    }


X = jax.random.normal(jax.random.key(0), (16, 6))


def dropped(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        noise = jax.random.normal(jax.random.key(4), x.shape)
        return (jnp.where(kept, x @ w, 0.0) * noise).mean()

    return jax.value_and_grad(loss)(w)


def accumulated(w: jax.Array, x: jax.Array) -> Any:
    """Microbatches (microbatch, example, feature); the gradients of all are summed once."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return (jnp.tanh(part @ w) ** 2).mean()

    def trip(total: Any, part: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, part)
        return jax.tree.map(jnp.add, total, (value, gradient)), value

    return jax.lax.scan(trip, (jnp.zeros(()), jnp.zeros_like(w)), x)


def scaled(w: jax.Array, x: jax.Array) -> Any:
    """Loss scaling: an update is left out where the scaled gradient overflows."""
    scale = jnp.float16(1024)

    def loss(w: jax.Array) -> jax.Array:
        return ((x.astype(jnp.float16) @ w.astype(jnp.float16)) ** 2).mean() * scale

    gradient = jax.grad(loss)(w) / scale.astype(jnp.float32)
    finite = jnp.isfinite(gradient).all()
    return jax.lax.cond(finite, lambda: w - 0.1 * gradient, lambda: w), finite


def layered(w: jax.Array, x: jax.Array) -> Any:
    """A scan over layers, forward and back."""

    def loss(stack: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        return (hidden**2).sum() / x.shape[0]

    return jax.value_and_grad(loss)(jnp.stack([w, 0.5 * w, -w]))


def told_per_example(w: jax.Array, x: jax.Array) -> Any:
    return (x @ w).max(1), (x @ w).max(), (x > 0).all(), x.argmax(1)


def halved(w: jax.Array, x: jax.Array) -> Any:
    """A loop that goes on until every example is small."""
    _, value = jax.lax.while_loop(lambda c: jnp.abs(c[1]).max() > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, x @ w))
    return value


def sorted_batch(w: jax.Array, x: jax.Array) -> Any:
    return jnp.sort((x @ w)[:, 0])


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
    mesh = jax.make_mesh(MESH.axis_sizes, MESH.axis_names)
    args = jax.random.normal(jax.random.key(1), (6, 6)), X
    expected = jax.jit(dropped)(*args)
    divided = parallel.data_parallel(dropped, mesh)
    return {
        "placed": off(expected, jax.jit(divided)(*divided.place(*args))),
        "not placed": off(expected, jax.jit(divided)(*args)),
        "planned": off(expected, memplan.jit(divided)(*args)),
    }


def compressed() -> dict[str, Any]:
    config = DecoderConfig(vocab=256, context=32, heads=2)
    step, (state, batch) = decoder_step(2, 64, 8, 32, config=config, concrete=True)
    divided = parallel.data_parallel(step, MESH, compress="bfloat16")
    placed, whole = divided.place(state, batch)
    run, plain = jax.jit(divided), jax.jit(step)
    for _ in range(20):
        placed, metrics = run(placed, whole)
        state, expected = plain(state, batch)
    try:
        divided(state, batch)
        refused = ""
    except memplan.MemplanError as error:
        refused = str(error)
    return {
        "loss": float(metrics["loss"]) / float(expected["loss"]),
        "how": [one.how for one in divided.sums],
        "refused": refused,
    }


def split_state() -> dict[str, Any]:
    step, (state, batch) = decoder()
    divided = parallel.data_parallel(step, MESH, split_state="opt_state")
    placed = divided.place(state)
    after, _ = jax.jit(divided)(placed, divided.assemble(batch))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(after.opt_state))
    return {"share": held / sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))}


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except memplan.MemplanError as error:
        return str(error)
    return ""


def indivisible() -> Any:
    step, (state, batch) = decoder()
    return parallel.data_parallel(step, MESH).place(state, jax.tree.map(lambda leaf: leaf[:6], batch))


def decomposed_twice() -> Any:
    step, (state, batch) = decoder()
    flag = {"xla_gpu_all_reduce_blueconnect_num_devices_per_host": 4}
    return memplan.jit(parallel.data_parallel(step, MESH), compiler_options=flag).plan(state, batch)


REFUSED: dict[str, Callable[[], Any]] = {
    "indivisible": indivisible,
    "twice": decomposed_twice,
    "too large": lambda: parallel.mesh({"host": 4, "device": 4}),
    "axes": lambda: parallel.data_parallel(dropped, parallel.mesh({"a": 8}), topology="ddl"),
    "wire": lambda: parallel.data_parallel(dropped, MESH, compress="int3"),
    "both": lambda: parallel.data_parallel(dropped, MESH, compress="bfloat16", split_state="opt_state"),
    "statistics": lambda: parallel.data_parallel(dropped, MESH, statistics="none"),
}

if __name__ == "__main__":
    print(
        json.dumps(
            {
                "same": {
                    "unet": same(unet),
                    "resnet": same(resnet),
                    "decoder": same(decoder),
                    "unet, split state": same(unet, split_state="opt_state"),
                    "decoder, split state": same(decoder, split_state="opt_state"),
                    "decoder, not decomposed": same(decoder, decompose=False),
                },
                "planned": planned(large_resnet, 0.85),
                "function": {
                    "dropped": function(dropped, X),
                    "accumulated": function(accumulated, X.reshape(2, 8, 6), batch_axis=1),
                    "scaled": function(scaled, X),
                    "layered": function(layered, X),
                    "per example": function(told_per_example, X),
                    "while": function(halved, X),
                    "sorted": function(sorted_batch, X),
                },
                "own statistics": own_statistics(),
                "over typed mesh": over_typed_mesh(),
                "compressed": compressed(),
                "split state": split_state(),
                "refused": {name: refused(make) for name, make in REFUSED.items()},
            }
        )
    )
