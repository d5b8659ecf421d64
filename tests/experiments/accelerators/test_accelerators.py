"""Work is measured beside its roofline."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp

from experiments.accelerators import run
from memplan.hardware.catalog import local_cpu


def test_a_product_is_counted_and_timed() -> None:
    device = local_cpu(2, 2**30)
    row = run.measured("product", (jnp.matmul, (jnp.ones((8, 16)), jnp.ones((16, 4)))), device)
    assert row.flops == 2 * 8 * 16 * 4 and row.measured_s > 0
    assert row.roofline_s >= row.flops / device.rate("float32")


def test_the_table_gives_shares_of_the_roofline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    rows = [{"work": "product", "flops": 4e9, "measured_s": 0.02, "roofline_s": 0.01}]
    (tmp_path / "cpu.json").write_text(json.dumps({"rows": rows}))
    assert "| cpu | product | 4.0 | 20.0 | 200 | 10.0 | 50% |" in run.table()


def test_the_cpu_is_here() -> None:
    assert "cpu" in run.here()
