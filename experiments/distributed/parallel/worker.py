"""One process of a data-parallel training; `memplan launch` starts as many as are wanted.

Rank 0 writes the flat state after the last step, and the losses, to a file.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.distributed.parallel.cases import CASES, trained
from memplan import parallel
from memplan.io import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--split-state", help="name of the state that each device keeps a part of")
    options = parser.parse_args()
    cluster = parallel.initialize()
    for name in options.cases:
        step, (state, batch) = CASES[name]()
        step = parallel.data_parallel(step, split_state=options.split_state)
        state, batch = step.place(state, batch)
        state, losses = trained(jax.jit(step, donate_argnums=0), state, batch, options.steps)
        whole = jax.jit(lambda tree: tree, out_shardings=step.whole)(state)
        if cluster.process == 0:
            save(options.out / f"{name}.npz", whole, losses)


def save(path: Path, state: Any, losses: list[float]) -> None:
    arrays: dict[str, Any] = {f"leaf_{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    written = io.BytesIO()
    np.savez(written, losses=np.asarray(losses), **arrays)
    write_atomic(path, written.getvalue())


if __name__ == "__main__":
    main()
