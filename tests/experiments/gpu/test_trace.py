"""Events of a profile, and interval arithmetic."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import memplan
from experiments.gpu import measure
from experiments.gpu.trace import Event, copies, events, kernels, overlap
from memplan.hardware import catalog
from memplan.xla.replay import replay


def test_a_copy_beside_kernels_is_not_hidden() -> None:
    assert overlap([(0.0, 1.0)], [(1.0, 2.0)]) == 0


def test_only_the_covered_part_counts_once() -> None:
    copied = [(0.0, 4.0), (2.0, 6.0)]  # their union is 6 long
    computed = [(1.0, 3.0), (2.5, 3.5), (5.0, 9.0)]
    assert overlap(copied, computed) == 3.5


def test_nothing_to_hide() -> None:
    assert overlap([], [(0.0, 1.0)]) == 0


def test_kernels_and_copies_are_told_apart_in_the_lines_of_streams() -> None:
    # As XLA's CUPTI collector writes them; other lines repeat the same time by module and by step.
    copy = _event(
        "MemcpyD2H", memcpy_details="kind_src:device kind_dst:pinned size:4096 dest:0 async:1"
    )
    kernel, fill = _event("loop_add_fusion", hlo_op="fusion.3"), _event("Memset")
    card = _plane(
        "/device:GPU:0",
        {"Stream #13(MemcpyD2H)": [copy], "Stream #7": [kernel, fill], "XLA Ops": [kernel]},
    )
    traced = events(SimpleNamespace(planes=[card, _plane("/host:CPU", {"Stream #1": [kernel]})]))
    assert [(event.op, event.span) for event in kernels(traced)] == [("fusion.3", (1.0, 3.0))]
    assert [event.nbytes for event in copies(traced, "D2H")] == [4096]
    assert copies(traced, "H2D") == []


def test_a_trace_stands_beside_the_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "local_device", lambda: catalog.named("h100"))
    plan = memplan.jit(lambda x: jnp.tanh(x @ x) @ x).plan(jnp.ones((64, 64)))
    module = plan.compile()._runner.executable.module
    op = next(iter(replay(module, catalog.named("h100")).seconds))
    moved = [
        Event("MemcpyD2H", "", (0.0, 4e-3), 1 << 20),
        Event("MemcpyH2D", "", (5e-3, 6e-3), 1 << 20),
    ]
    traced = [Event("one", op, (0.0, 1e-3), 0), Event("of a graph", "", (3e-3, 6e-3), 0), *moved]
    figures = measure.Figures()
    measure._look_inside(traced, module, plan.report, 7e-3, tmp_path, figures)
    assert figures.pairs["kernels_s"][0] == pytest.approx(4e-3)
    assert figures.pairs["memcpys to the host_bytes/s"][0] == pytest.approx((1 << 20) / 4e-3)
    assert figures.pairs["memcpys to the host, share under kernels"][0] == pytest.approx(0.5)
    assert figures.pairs["memcpys to the device, share under kernels"][0] == pytest.approx(1)
    assert figures.facts[
        "share of the kernels' time that is known by instruction"
    ] == pytest.approx(0.25)
    assert any(
        name.startswith("far off") and pair[0] == pytest.approx(1e-3)
        for name, pair in figures.pairs.items()
    )
    # no kernel at all
    measure._look_inside(moved, module, plan.report, 7e-3, tmp_path, measure.Figures())


def _event(name: str, **stats: str) -> Any:
    return SimpleNamespace(name=name, start_ns=1e9, duration_ns=2e9, stats=list(stats.items()))


def _plane(name: str, lines: dict[str, list[Any]]) -> Any:
    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(name=line, events=events_of_line)
            for line, events_of_line in lines.items()
        ],
    )
