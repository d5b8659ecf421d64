"""A planner that may only move, and the table of links."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.link_speed import run
from memplan.program.extract import extract
from memplan.program.trace import trace


def test_nothing_heavy_may_run_twice() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x).sum(0)

    graph = extract(trace(step, (jnp.ones((4, 4)),), {}, {}))
    allowed = {op.fusion: op.recomputable for op in run.swapping(graph).ops}
    assert allowed["elementwise"] and not allowed["kernel"] and not allowed["reduction"]


def test_every_link_is_told_against_the_slowest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    links = {link: {"step_s": 1 / (n + 1), "copy_s": 0.1, "hidden_copy_s": 0.0} for n, link in enumerate(run.LINKS)}
    found = {"device_bytes": 2**30, "host_bytes": 2**31, "batch": 5, "image": 1000, "links": links}
    (tmp_path / "swapping.json").write_text(json.dumps(found))
    lines = run.table().splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == [f"{n + 1}.00x |" for n in range(len(run.LINKS))]
    assert lines[0].startswith("| swapping | pcie3x16 |") and "| 1024 | 2048 | 100 | 1000 | 5.0 |" in lines[0]
