"""A data-parallel training in which one rank differs from the others, dies, stops or leaves early.

memplan launch -n 3 --devices 1 -- python tests/parallel/trainer.py --odd 1 --what kill
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from memplan import parallel

ROWS, STEPS, MOMENT, WIDTH = 4, 8, 5, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--odd", type=int, default=-1)
    parser.add_argument("--what", default="")
    options = parser.parse_args()
    cluster = parallel.initialize()
    fault = options.what if cluster.process == options.odd else ""
    width = WIDTH + (fault == "shape")
    step = parallel.data_parallel(step_of(fault))
    key = jax.random.key(1 if fault == "seed" else 0)
    state = step.place({"w": 0.1 * jax.random.normal(key, (width,)), "key": jax.random.key(0)})
    fit = memplan.jit(step, donate_argnums=0)
    for k in range(STEPS):
        if k == MOMENT:
            act(fault)
        rows = np.random.default_rng(k).normal(size=(ROWS, width)).astype(np.float32)
        state, loss = fit(state, step.assemble(rows))
        say(f"step {k} loss {float(loss):.5f}")
    say("done")


def act(fault: str) -> None:
    say(f"acting at {time.time():.2f}")
    match fault:
        case "leave":
            sys.exit(0)
        case "raise":
            raise ValueError("bad data")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def step_of(fault: str) -> Any:
    rate = 0.2 if fault == "rate" else 0.1

    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
        value, slope = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x.sum(1)) ** 2))(
            state["w"]
        )
        return {"w": state["w"] - rate * slope, "key": jax.random.split(state["key"], 1)[0]}, value

    return step


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
