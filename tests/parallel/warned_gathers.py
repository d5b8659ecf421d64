"""Plans steps over eight CPU devices in a process of its own; prints their warnings as JSON."""

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


def warnings_of(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memplan.jit(case.step, **case.options).plan(*shaped(case))
    return [str(warning.message) for warning in caught]


def main() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    makes = {**{name: make for name, (make, _, _) in LOUD.items()}, **SILENT}
    print(json.dumps({name: warnings_of(make(mesh)) for name, make in makes.items()}))


if __name__ == "__main__":
    main()
