"""One of two hosts: trains a decoder under jax.jit, then memplan.jit, and counts sent bytes.

python -m experiments.distributed.slow_link.worker RANK COORDINATOR DEVICES INTERFACE STEPS

Rank 0 prints JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from memplan import parallel
from memplan.parallel.meshes import measure_topology
from models.train import decoder_step
from models.transformer import DecoderConfig

HOSTS, BATCH, TOKENS = 2, 8, 16
METHODS: dict[str, dict[str, Any] | None] = {
    "jit": None,
    "memplan": {},
    "bfloat16": {"between_hosts": "bfloat16"},
}


def main(rank: str, coordinator: str, devices: str, interface: str, steps: str) -> None:
    jax.config.update("jax_num_cpu_devices", int(devices))
    cluster = parallel.initialize(coordinator, HOSTS, int(rank))
    mesh = parallel.mesh()
    links = measure_topology(mesh)
    step, (state, batch) = decoder_step(
        4,
        256,
        BATCH,
        TOKENS,
        config=DecoderConfig(vocab=512, context=TOKENS, heads=4),
        concrete=True,
    )
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    results = {}
    for method, options in METHODS.items():
        divided = parallel.data_parallel(step, mesh)
        if options is None:
            run = jax.jit(divided, donate_argnums=0)
        else:
            run = memplan.jit(divided, donate_argnums=0, topology=links, **options)
        results[method] = trained(divided, run, state, batch, counter, steps)
    if cluster.process == 0:
        gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        axes = {
            axis.name: {"latency_s": axis.latency_s, "bandwidth": axis.bandwidth}
            for axis in links.axes
        }
        print(
            json.dumps(
                {
                    "gradient_bytes": gradients,
                    "devices": int(devices),
                    "links": axes,
                    "ways": results,
                }
            )
        )


def trained(
    step: parallel.DataParallel, run: Any, state: Any, batch: Any, counter: Path, steps: str
) -> dict[str, Any]:
    """Medians of the bytes that this host sent in a step and of its seconds; all losses."""
    state, batch = step.place(state, batch)
    seconds, losses, sent = [], [], []
    for _ in range(int(steps)):
        before, start = int(counter.read_text()), time.perf_counter()
        state, metrics = jax.block_until_ready(run(state, batch))
        seconds.append(time.perf_counter() - start)
        sent.append(int(counter.read_text()) - before)
        losses.append(float(metrics["loss"]))
    medians = {"sent_bytes": float(np.median(sent[1:])), "step_s": float(np.median(seconds[1:]))}
    return {**medians, "losses": losses}


if __name__ == "__main__":
    main(*sys.argv[1:])
