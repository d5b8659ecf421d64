"""Links from timed all-reduces: those of a known machine come out as they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from memplan.hardware.collectives import Decomposition, Phase, all_reduce_seconds
from memplan.hardware.topology import Topology, topology_named
from memplan.parallel import measure


def measured(known: Topology, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """What would be measured where all-reduces take what the cost model says."""

    def seconds(mesh: Any, axis: str, nbytes: int) -> float:
        return all_reduce_seconds(known, Decomposition((Phase((axis,), False),)), nbytes)

    monkeypatch.setattr(measure, "_seconds", seconds)
    devices = np.full(tuple(known.sizes.values()), SimpleNamespace(device_kind="chip"))
    mesh: Any = SimpleNamespace(shape=known.sizes, devices=devices)
    return measure.measure_topology(mesh, "mine")


@pytest.mark.parametrize("name", ["ddl@2x4", "ddl@8x2", "today@4x8"])
def test_a_known_machine_comes_out_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = topology_named(name)
    found = measured(known, monkeypatch)
    assert found.name == "mine" and found.sizes == known.sizes
    for one, other in zip(found.axes, known.axes, strict=True):
        assert one.latency_s == pytest.approx(other.latency_s, rel=0.05, abs=1e-6)
        assert one.bandwidth == pytest.approx(other.bandwidth, rel=0.01)


def test_faster_than_its_launch_is_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    known = topology_named("ddl@1x4")
    fast = replace(known, axes=(known.axes[0], replace(known.axes[1], latency_s=0.0, bandwidth=1e15)))
    found = measured(fast, monkeypatch)
    assert all(axis.latency_s >= 0 and axis.bandwidth > 0 for axis in found.axes)


def test_an_axis_of_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_seconds", None)
    found = measure.measure_topology(jax.make_mesh((1, 1), ("host", "device")))
    assert [(axis.size, axis.latency_s, axis.shared) for axis in found.axes] == [(1, 0.0, True), (1, 0.0, False)]
