"""Ring attention in slabs of query rows inside of its `shard_map`: chosen, exact, and as large as predicted."""

from typing import Any

import pytest
from jax.sharding import AbstractMesh

import memplan
from memplan.planning.slabs.slabs import Slabs
from tests.parallel.printed import printed_by
from tests.parallel.rings import DEVICES, ring_shapes, ring_step, scores_nbytes


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """Results of `slabs_on_eight.py`."""
    return printed_by("tests.parallel.slabs_on_eight")


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", ["True", "False"])
def test_slabs_of_queries_compute_what_the_step_computes(check_vma: str, on_eight: Any) -> None:
    row = on_eight[check_vma]
    assert row["depths"] and set(row["depths"]) == {2}  # in the scan in the shard_map
    assert row["off"] < 1e-5 and row["followed"]
    assert row["within"] <= 1
    assert 1 <= row["predicted"] <= 1.01  # XLA:CPU packs tables of pointers more tightly


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_described_gpu_has_the_predicted_bytes() -> None:
    mesh, tokens = AbstractMesh((DEVICES,), ("d",)), 8192
    budget = 3 * scores_nbytes(tokens) // 2
    step, shapes = ring_step(mesh), ring_shapes(mesh, tokens)
    planned = memplan.jit(step, device="v100", budget=budget).plan(*shapes)
    assert any(isinstance(t, Slabs) and len(t.inside) == 2 for t in planned.plan.transforms)
    excess = planned.report.predicted_peak_bytes - planned.report.compiled_peak_bytes
    assert 0 <= excess <= 4096  # tables of pointers are packed more tightly
    assert planned.report.compiled_peak_bytes <= budget
    followed = memplan.jit(step, device="v100", plan=planned.plan).plan(*shapes)
    assert followed.report.compiled_peak_bytes == planned.report.compiled_peak_bytes
