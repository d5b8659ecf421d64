"""One training for Slurm, Kubernetes, `memplan launch` and a single process, which continues from its last checkpoint.

Variables of the environment: CHECKPOINTS, a folder that all processes see; STEPS; BUDGET of each device.
"""

import os
from itertools import pairwise
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import memplan
from memplan import parallel

SIZES = (2, 64, 64, 64, 1)
ROWS = 1024  # of the global batch
EXAMPLES = 16 * ROWS
EVERY = 3  # steps from one checkpoint to the next

cluster = parallel.initialize()  # before jax is used: jax.distributed, as the environment says
optimizer = optax.adam(1e-2)


def start():
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, pairwise(SIZES), strict=True)]
    return params, optimizer.init(params)


def example(number):
    x = np.random.default_rng(number).normal(size=2).astype(np.float32)  # in place of reading it
    return {"x": x, "y": np.sin(3 * x).sum(keepdims=True)}


def batches_of(rank, processes):
    """The rows of this process: every `processes`-th of one order, which is shuffled anew in each epoch."""
    order = grain.MapDataset.range(EXAMPLES).seed(0).shuffle().repeat()
    rows = order[rank::processes].map(example).batch(ROWS // processes)
    return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def loss_of(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel / kernel.shape[0] ** 0.5)
    return ((x - batch["y"]) ** 2).mean()


def train_step(state, batch):
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


step = parallel.data_parallel(train_step)  # over all devices of all processes
train = memplan.jit(step, budget=os.environ.get("BUDGET", "90%"), donate_argnums=0)
state, batches, first = step.place(start()), batches_of(cluster.process, cluster.processes), 0

options = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2)
with ocp.CheckpointManager(Path(os.environ["CHECKPOINTS"]).absolute(), options=options) as manager:
    if (last := manager.latest_step()) is not None:  # without interrupted saves
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
        parts = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), batches=grain.checkpoint.CheckpointRestore(batches)
        )
        state, first = manager.restore(last, args=parts).state, last + 1
    print(f"{cluster}, begins at {first}", flush=True)
    for number in range(first, int(os.environ.get("STEPS", "12"))):
        state, loss = train(state, step.assemble(next(batches)))
        if number == first:
            print(f"planner {train.report.planner}: {train.report.compiled_peak_bytes} bytes", flush=True)
        print(f"step {number} loss {float(loss):.6f} {float(loss).hex()}", flush=True)
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), batches=grain.checkpoint.CheckpointSave(batches))
        manager.save(number, args=parts)  # every third; the state is written in the background
