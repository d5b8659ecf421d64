"""Plans steps over eight CPU devices; prints what is warned of in each as JSON. To be run in a process of its own."""

import json
import os
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh

import memplan
from tests.parallel.gathering_steps import LOUD, SILENT
from tests.parallel.meshed_steps import AXES, Case, shaped


def told(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        memplan.jit(case.step, **case.options).plan(*shaped(case))
    return [str(one.message) for one in found]


def main() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    makes = {**{name: make for name, (make, _, _) in LOUD.items()}, **SILENT}
    print(json.dumps({name: told(make(mesh)) for name, make in makes.items()}))


if __name__ == "__main__":
    main()
