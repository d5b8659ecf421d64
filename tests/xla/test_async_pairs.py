"""Asynchronous pairs: what XLA prints is given back to it in words that it reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from memplan import parallel, pipeline
from memplan.program import compat
from memplan.request import Request
from memplan.xla.async_pairs import expand_async_pairs
from tests.xla.steps import dense

MODULE = """HloModule step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  LINE
  ROOT %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}
"""
ATTRIBUTES = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add"
NESTED = f"%all-reduce-start = ((f32[8]{{0}}), f32[8]{{0}}) all-reduce-start(%x), {ATTRIBUTES}"
NESTED += ', metadata={op_name="a, (b{"}'
OLDER = f"%all-reduce-start = f32[8]{{0}} all-reduce-start(%x), {ATTRIBUTES}"


def test_a_pair_comes_back_as_it_was() -> None:
    text = expand_async_pairs(MODULE.replace("LINE", NESTED))
    assert "async-start(%x), calls=%all-reduce-start.computation, metadata=" in text
    assert "all-reduce(%all-reduce-start.operand.0), " + ATTRIBUTES in text
    assert "async-done(%all-reduce-start)" in text
    again = compat.module_text(compat.module_proto(text))
    assert text.index("%add (") < text.index("%all-reduce-start.computation (") < text.index("ENTRY")
    assert "ROOT %all-reduce-done = f32[8]{0} " in again


def test_what_is_read_as_it_is_stays_so() -> None:
    text = MODULE.replace("LINE", OLDER)
    assert expand_async_pairs(text) == text
    compat.module_proto(text)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_step_over_a_mesh_fits_its_budget() -> None:
    """Collectives of a planned module are those of the plain one, asynchronous as there."""
    step, (state, _) = dense(256, 8)
    args = state, jax.ShapeDtypeStruct((16384, 256), jnp.float32)
    mesh = AbstractMesh((2, 4), ("host", "device"))
    divided = parallel.data_parallel(step, mesh)
    options = {"donate_argnums": 0}
    plain = pipeline.best(divided, args, {}, options, Request(device="v100"))
    request = Request(int(0.7 * plain.device_bytes), device="v100")
    found = pipeline.best(divided, args, {}, options, request)
    assert found.fits and found.planned is not None and found.planned.plan is not None
    assert found.device_bytes <= 0.7 * plain.device_bytes
