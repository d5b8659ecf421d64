"""Random steps over eight CPU devices and on one, compiled; prints one JSON object. Run in a process of its own."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

from memplan import parallel
from memplan.parallel.step import data_parallel
from tests.parallel.emit import operations
from tests.parallel.emit.random_steps import drawn_step
from tests.parallel.simulator.simulated import raw

MESHES = ((8,), (2, 4), (2, 2, 2), (4,), (2, 2))
EXACT = {**operations.SHAPED, **operations.SHAPED_EXACT, **operations.ELEMENTWISE, **operations.ELEMENTWISE_EXACT}
SMOOTH = {**operations.SHAPED, **operations.SHAPED_SMOOTH, **operations.ELEMENTWISE_SMOOTH}


def off(seed: int) -> float:
    """The largest difference of any result over what rounding may do; of an exact step, of any bit."""
    rng = random.Random(seed)
    exact = seed % 2 == 0
    menu = EXACT if exact else SMOOTH
    ops = {name: menu[name] for name in rng.sample(list(menu), 3)}
    drawn = drawn_step(rng.randbytes(64), ops, exact, MESHES)
    mesh = parallel.mesh({f"a{i}": size for i, size in enumerate(drawn.sizes)})
    options = {"batch_axis": drawn.batch_axis, "split_state": "moments" if drawn.split_state else None}
    divided = data_parallel(drawn.step, mesh, **options)
    found = jax.jit(divided)(*divided.place(drawn.state, drawn.batch))
    expected = jax.jit(drawn.step)(drawn.state, drawn.batch)
    pairs = zip(*map(jax.tree.leaves, (expected, found)), strict=True)
    return max(_off(raw(one), raw(other), exact) for one, other in pairs)


def _off(expected: np.ndarray, found: np.ndarray, exact: bool) -> float:
    if exact or expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, found, equal_nan=True) else np.inf
    return float(np.abs(expected - found).max(initial=0.0) / (1e-3 * np.abs(expected).max(initial=1.0)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({seed: off(seed) for seed in range(int(sys.argv[1]))}))
