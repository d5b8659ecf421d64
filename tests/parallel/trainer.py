"""A data-parallel training by `data_parallel`, in which one rank may be unlike the others or leave.

memplan launch -n 3 -- python tests/parallel/trainer.py --ill 1 --what seed
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.parallel.meshes import mesh
from memplan.parallel.runtime.cluster import initialize
from memplan.parallel.step import data_parallel

ROWS, STEPS, MOMENT = 4, 8, 5
WIDTH = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ill", type=int, default=-1)
    parser.add_argument("--what", default="")
    parser.add_argument("--by-jax", action="store_true", help="jax.distributed.initialize, and nobody calls memplan's")
    parser.add_argument("--late", action="store_true", help="memplan's after jax's")
    parser.add_argument("--coordinator", default=os.environ.get("MEMPLAN_COORDINATOR"))
    parser.add_argument("--processes", type=int, default=int(os.environ.get("MEMPLAN_PROCESSES", "0")))
    parser.add_argument("--process", type=int, default=int(os.environ.get("MEMPLAN_PROCESS", "0")))
    options = parser.parse_args()
    meet(options)
    train(options.what if options.process == options.ill else "", options)
    say("done")


def meet(options: argparse.Namespace) -> None:
    if options.by_jax or options.late:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    if not options.by_jax:
        found = options.late or "MEMPLAN_COORDINATOR" in os.environ
        say(str(initialize(*(() if found else (options.coordinator, options.processes, options.process)))))


def train(what: str, options: argparse.Namespace) -> None:
    width = WIDTH + (what == "shape")
    step = data_parallel(step_of(what), mesh())
    if what == "late":
        time.sleep(8)
    if options.what == "inspect" and what:
        step.place(begin(9, WIDTH))
        step.divided((begin(0, WIDTH), jax.ShapeDtypeStruct((2 * ROWS * options.processes, WIDTH), jnp.float32)))
    say("placing")
    state = step.place(begin(1 if what == "seed" else 0, width))
    fit = jax.jit(step, donate_argnums=0)
    for k in range(MOMENT if what == "fewer" else STEPS):
        if k == MOMENT:
            act(what)
        rows = ROWS - 1 if what == "rows" or (what == "last" and k == MOMENT) else ROWS
        batch = step.assemble(np.random.default_rng(k).normal(size=(rows, width)).astype(np.float32))
        if k == MOMENT and what == "after":
            sys.exit(3)
        state, loss = fit(state, batch)
        say(f"step {k} loss {float(loss):.5f}")
    if what == "alone":
        alone(state)


def act(what: str) -> None:
    if what == "exit0":
        sys.exit(0)
    if what == "exit3":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def alone(state: Any) -> None:
    """What rank 0 may do when the others have left: compute on its own device, and wait."""
    weights = jax.device_get(state["w"])
    evaluate = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3_000_000, lambda _, x: jnp.tanh(x + w), x))
    end = time.monotonic() + 4
    while time.monotonic() < end:
        evaluate(np.ones(WIDTH, np.float32), weights).block_until_ready()
    say("evaluated")
    time.sleep(8)


def begin(seed: int, width: int) -> dict[str, jax.Array]:
    key = jax.random.key(seed)
    return {"w": 0.1 * jax.random.normal(key, (width,)), "key": jax.random.key(0)}


def step_of(what: str) -> Any:
    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            active = (jax.nn.relu if what == "activation" else jnp.tanh)(x @ w)
            return jnp.mean((active - x.sum(1)) ** 2)

        value, slope = jax.value_and_grad(loss)(state["w"])
        rate = 0.2 if what == "rate" else 0.1
        return {"w": state["w"] - rate * slope, "key": jax.random.split(state["key"], 1)[0]}, value

    return step


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
