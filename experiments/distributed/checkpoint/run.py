"""Training with state on the host, killed while it saves: does the last checkpoint restore, do the losses go on?

python -m experiments.distributed.checkpoint.run [--kills 20]    # writes results/checkpoint.json
python -m experiments.distributed.checkpoint.run --train FOLDER  # the training that is killed
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import memplan
from memplan.io import write_atomic

RESULT = Path(__file__).parent / "results" / "checkpoint.json"
LAYERS, WIDTH, BATCH, STEPS = 4, 512, 16, 60
OPTIMIZER = optax.adamw(1e-3)


def start(layers: int = LAYERS) -> Any:
    """Weights and moments; every weight is 1 MiB."""
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, OPTIMIZER.init(weights)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    weights, moments = state

    def loss(weights: Any) -> jax.Array:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.square(y - x).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def train(folder: Path) -> None:
    """From the last checkpoint to the end; says on standard output when it begins to save and what the losses are."""
    step = memplan.jit(train_step, host_state=0, donate_argnums=0)
    planned = step.plan(start(), jnp.zeros((BATCH, WIDTH)))
    compiled, state, first = planned.compile(), planned.place(start()), 0
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        last = manager.latest_step()
        if last is not None:
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
            )
            kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
            state, first = manager.restore(last, args=ocp.args.StandardRestore(like)), last + 1
            assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] == kinds
        tell(restored=last)
        for number in range(first, STEPS):
            batch = jax.random.normal(jax.random.key(number), (BATCH, WIDTH))
            state, loss = compiled(state, batch)
            tell(step=number, loss=float(loss).hex())
            tell(saving=number)
            manager.save(number, args=ocp.args.StandardSave(state))
            tell(saved=number)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def told(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def started(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.distributed.checkpoint.run", "--train", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def whole(folder: Path, losses: dict[int, set[str]]) -> float:
    """Train to the end; seconds that a save takes."""
    process, begun, taken = started(folder), 0.0, [0.0]
    for event in told(process):
        if "step" in event:
            losses.setdefault(event["step"], set()).add(event["loss"])
        elif "saving" in event:
            begun = time.perf_counter()
        elif "saved" in event:
            taken.append(time.perf_counter() - begun)
    if process.wait():
        raise RuntimeError("the training failed; run it with --train to see why.")
    return sum(taken) / max(1, len(taken) - 1)


def killed(folder: Path, losses: dict[int, set[str]], after: int, wait_s: float) -> dict[str, Any]:
    """Train, and kill it `wait_s` into its save number `after`; which checkpoint it began with, and where it died."""
    process, restored, saves = started(folder), None, 0
    for event in told(process):
        if "restored" in event:
            restored = event["restored"]
        elif "step" in event:
            losses.setdefault(event["step"], set()).add(event["loss"])
        elif "saving" in event:
            saves += 1
            if saves > after:
                time.sleep(wait_s)
                process.kill()
                process.wait()
                return {"restored": restored, "killed_in_save": event["saving"], "after_s": wait_s}
    raise RuntimeError("the training ended before it was killed; take more steps or fewer kills.")


def run(kills: int, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        expected: dict[int, set[str]] = {}
        save_s = whole(Path(one) / "run", expected)
        found: dict[int, set[str]] = {}
        attempts = []
        for _ in range(kills):
            attempts.append(killed(Path(other) / "run", found, draw.randint(0, 2), draw.uniform(0, save_s)))
            print(attempts[-1], flush=True)
        whole(Path(other) / "run", found)
    again = [number for number in expected if found.get(number) != expected[number]]
    return {"kills": kills, "save_s": save_s, "steps": STEPS, "losses_that_differ": again, "attempts": attempts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--train", type=Path)
    args = parser.parse_args()
    if args.train:
        train(args.train)
    else:
        RESULT.parent.mkdir(exist_ok=True)
        write_atomic(RESULT, json.dumps(run(args.kills), indent=1) + "\n")


if __name__ == "__main__":
    main()
