"""A small data-parallel training for the tests and distributed/failures: linear regression by plain shard_map.

    memplan launch -n 4 -- python tests/parallel/toy.py --folder F --steps 40

The batch of a step depends on its number alone: a run that goes on from a checkpoint sees what an undisturbed one saw.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memplan.parallel.runtime.checkpoint import Checkpoints
from memplan.parallel.runtime.cluster import initialize
from memplan.parallel.runtime.preflight import agree, preflight
from memplan.parallel.runtime.watchdog import Watchdog

ROWS, WIDTH = 64, 8
OPTIMIZER = optax.adam(0.05)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: Any
    params: Any
    opt_state: Any


def main() -> None:
    options = arguments()
    say("started")
    cluster = initialize(options.coordinator, options.processes, options.process, timeout_s=options.meet_s)
    say(str(cluster))
    watchdog = Watchdog(cluster, options.watchdog_s, start_s=options.start_s)
    found = preflight(cluster)
    agree("the batch", (ROWS + (3 if cluster.process == options.odd_rank else 0), WIDTH), cluster)
    say(f"all-reduce {found.second_all_reduce_s:.4f} s")

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole = NamedSharding(mesh, P())
    checkpoints = Checkpoints(options.folder, every=options.every)
    spread = NamedSharding(mesh, P("batch"))
    state, seen = jax.jit(begin, out_shardings=whole)(), jax.jit(lambda: jnp.zeros(ROWS), out_shardings=spread)()
    start = 0
    if checkpoints.latest() is not None:
        start, (state, seen) = checkpoints.restore((state, seen))
        say(f"resumed at {start}")
    step = jax.jit(parallel_step(mesh))
    for k in range(start, options.steps):
        if cluster.process == options.hang_rank and k == options.hang_step:
            time.sleep(3600)
        if cluster.process == options.fail_rank and k == options.fail_step:
            raise RuntimeError("this rank was told to fail")
        with watchdog.step(k):
            state, seen, loss = step(state, seen, batch(k, spread))
            told = float(loss)
        if cluster.process == 0:
            with (Path(options.folder) / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": k, "loss": told.hex()}) + "\n")
        say(f"step {k} loss {told:.6f}")
        checkpoints.save(k + 1, (state, seen))
        time.sleep(options.pause_s)
    watchdog.stop()
    say(f"seen {zlib.crc32(multihost_utils.process_allgather(seen, tiled=True).tobytes())}")
    say("done")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.02)
    parser.add_argument("--watchdog-s", type=float, default=5.0)
    parser.add_argument("--start-s", type=float, default=30.0)
    parser.add_argument("--meet-s", type=float)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--odd-rank", type=int, default=-1)
    for what in ("hang", "fail"):
        parser.add_argument(f"--{what}-rank", type=int, default=-1)
        parser.add_argument(f"--{what}-step", type=int, default=-1)
    return parser.parse_args()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def begin() -> TrainState:
    params = {"w": jnp.zeros(WIDTH), "b": jnp.zeros(())}
    return TrainState(jnp.int32(0), params, OPTIMIZER.init(params))


def batch(k: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(k)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = x @ np.arange(WIDTH, dtype=np.float32) + 1
    parts = (jax.make_array_from_callback(one.shape, sharding, lambda index, one=one: one[index]) for one in (x, y))
    return tuple(parts)  # type: ignore[return-value]


def parallel_step(mesh: Mesh) -> Any:
    """state, seen, (x, y) -> state, seen, loss: the mean over the whole batch, summed over the devices.

    `seen` is divided like the batch and the same whatever the number of devices, to the bit.
    """

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.psum(((x @ params["w"] + params["b"] - y) ** 2).sum(), "batch") / ROWS

    def step(state: TrainState, seen: jax.Array, data: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
        value, gradient = jax.value_and_grad(loss)(state.params, *data)
        updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), 0.9 * seen + data[0][:, 0], value

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=(P(), P("batch"), P()))


if __name__ == "__main__":
    main()
