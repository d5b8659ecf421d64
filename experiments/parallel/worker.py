"""One process of a data-parallel training; `memplan launch` starts as many as are wanted.

Rank 0 writes the flat state after the last step, and the losses, to a file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from experiments.parallel.cases import CASES, trained
from memplan import parallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--split-state", help="name of the state that each device keeps a part of")
    parser.add_argument("--share", type=float, help="of the unplanned peak: plan the step for this budget")
    options = parser.parse_args()
    cluster = parallel.initialize()
    for name in options.cases:
        step, (state, batch) = CASES[name]()
        step = parallel.data_parallel(step, split_state=options.split_state)
        state, batch = step.place(state, batch)
        run = planned(step, state, batch, options.share) if options.share else jax.jit(step, donate_argnums=0)
        state, losses = trained(run, state, batch, options.steps)
        whole = jax.jit(lambda tree: tree, out_shardings=step.whole)(state)
        if cluster.process == 0:
            save(options.out / f"{name}.npz", whole, losses)


def planned(step: Any, state: Any, batch: Any, share: float) -> Any:
    memory = jax.jit(step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    found = memplan.jit(step, budget=int(share * (peak - memory.alias_size_in_bytes)), donate_argnums=0)
    assert found.plan(state, batch).plan is not None
    return found


def save(path: Path, state: Any, losses: list[float]) -> None:
    leaves = {f"leaf_{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, losses=np.asarray(losses), **leaves)
    os.replace(part, path)


if __name__ == "__main__":
    main()
