"""Meshes and shardings as users write them: on eight CPU devices, and for described GPUs."""

import json
import subprocess
import sys
from typing import Any

import jax
import pytest

import memplan
from memplan.errors import MeshError, TopologyError
from tests.parallel.meshed_steps import ABSTRACT, CASES, MLP, constrained, fsdp, mlp, shaped
from tests.parallel.printed import ROOT, printed_by


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """Results of `user_meshes.py`."""
    return printed_by("tests.parallel.user_meshes")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "by one argument", "in context", "by pmap"])
def test_on_any_mesh_the_budget_is_kept_and_nothing_else_changes(name: str, on_eight: Any) -> None:
    row = on_eight[name]
    assert row["planner"] == "kernels" and row["within"] <= 1
    assert row["predicted"] == pytest.approx(1, abs=1e-3)
    assert row["off"] < 1e-6 and row["placed"]


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name",
    [
        "in_space",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in CASES
            if name not in ("constrained", "in_space")
        ),
    ],
)
def test_an_abstract_mesh_is_planned_for_described_gpus(name: str) -> None:
    case = CASES[name](ABSTRACT)
    options = {"device": "a100", "topology": "2x4", **case.options}
    whole = memplan.jit(case.step, **options).plan(*shaped(case))
    assert whole.report.jit_peak_bytes is None
    budget = whole.report.baseline_peak_bytes * 4 // 5
    planned = memplan.jit(case.step, budget=budget, **options).plan(*shaped(case))
    assert planned.report.planner == "kernels"
    assert planned.report.compiled_peak_bytes <= budget
    # Without a budget, the whole device is the limit.
    followed = memplan.jit(case.step, plan=planned.plan, **options).plan(*shaped(case))
    assert followed.report.compiled_peak_bytes == planned.report.compiled_peak_bytes


@pytest.mark.gpu_aot
def test_the_plan_is_for_the_arrays_of_one_device() -> None:
    case = fsdp(ABSTRACT)
    planned = memplan.jit(case.step, device="a100").plan(*shaped(case))
    memory = planned._outcome.executable.compiled.memory_analysis()
    assert (
        memory.argument_size_in_bytes
        == sum(leaf.size * 4 for leaf in jax.tree.leaves(case.shapes)) // 8
    )
    machine = planned._outcome.program.machine
    assert machine.topology.name == "today@1x8"


CONCRETE = """
import json, sys
import jax, numpy as np, memplan
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import Mesh
from tests.parallel.meshed_steps import AXES, CASES, shaped
for order in (range(8), (7, 3, 5, 1, 6, 2, 4, 0)):
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(2, 4), AXES)
    for name in sys.argv[1:]:
        case = CASES[name](mesh)
        planned = memplan.jit(case.step, device="a100", topology="2x4", **case.options).plan(*shaped(case))
        memory = planned._outcome.executable.compiled.memory_analysis()
        machine = planned._outcome.program.machine
        print(json.dumps([name, memory.argument_size_in_bytes, list(machine.devices)]))
"""


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_described_gpus_replace_the_devices_of_a_mesh() -> None:
    command = [sys.executable, "-c", CONCRETE, "fsdp", "constrained", "mapped"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    weights, batch = (sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes)) for shapes in MLP)
    orders = list(range(8)), [7, 3, 5, 1, 6, 2, 4, 0]
    assert rows == [
        [name, nbytes, order]
        for order in orders
        for name, nbytes in (
            ("fsdp", (weights + batch) // 8), ("constrained", weights + batch // 8), ("mapped", weights + batch // 8)
        )
    ]  # fmt: skip


def test_an_abstract_mesh_without_a_device_is_refused_with_what_to_do() -> None:
    case = fsdp(ABSTRACT)
    for options in ({"in_shardings": case.shardings}, {}):
        with pytest.raises(MeshError, match=r"has no devices\. Pass device= .*, or use a Mesh"):
            memplan.jit(mlp, **options).plan(*(MLP if options else shaped(case)))


@pytest.mark.gpu_aot
def test_constraints_over_an_abstract_mesh_alone_are_refused() -> None:
    """jax would lower the whole step for one device."""
    case = constrained(ABSTRACT)
    for options in ({"device": "a100"}, {}):
        with pytest.raises(
            MeshError, match=r"AbstractMesh of 8 devices, but no argument lies on it.*in_shardings"
        ):
            memplan.jit(case.step, **options).plan(*case.shapes)


@pytest.mark.gpu_aot
def test_a_topology_of_another_size_is_refused() -> None:
    case = fsdp(ABSTRACT)
    with pytest.raises(TopologyError, match="has 16 devices; the program runs on 8"):
        memplan.jit(case.step, device="a100", topology="2x8").plan(*shaped(case))
