"""Orbax saves the state of a planned training and restores it: a killed training continues with the same losses.

The environment variable CHECKPOINTS names the folder.
"""

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import memplan

SIZES = (2, 32, 32, 32, 1)
STEPS = 9
optimizer = optax.adam(1e-2)


def start():
    *keys, data = jax.random.split(jax.random.key(0), len(SIZES))
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, pairwise(SIZES), strict=True)]
    x = jax.random.normal(data, (4096, 2))
    return params, optimizer.init(params), {"x": x, "y": jnp.sin(3 * x).sum(1, keepdims=True)}


def loss_of(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel / kernel.shape[0] ** 0.5)
    return ((x - batch["y"]) ** 2).mean()


@memplan.jit(budget="1700KiB", donate_argnums=(0, 1))  # was: @jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state, batch = start()
losses, first = [], 0
folder = Path(os.environ.get("CHECKPOINTS") or tempfile.mkdtemp())
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
    if (last := manager.latest_step()) is not None:  # without interrupted saves
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), (params, opt_state)
        )
        (params, opt_state), first = manager.restore(last, args=ocp.args.StandardRestore(like)), last + 1
    print(f"begins at {first}", flush=True)
    for number in range(first, STEPS):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
        print(f"step {number} {losses[-1].hex()}", flush=True)
        manager.save(number, args=ocp.args.StandardSave((params, opt_state)))  # in the background
