"""Simulated scaling: what is replayed, and that more devices and more overheads never pay."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware.overheads import NONE, SOURCES, Overheads
from memplan.hardware.topology import TOPOLOGIES, Topology, topology_named
from memplan.report.scaling import Scaling
from memplan.studies.scaling import LARGEST, CompiledStep, compile_step, shapes, simulate
from tests.dense import step

WIDTH = 512


@pytest.mark.parametrize("links", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_shapes_grow_from_one_device_through_what_was_compiled(links: Topology) -> None:
    found = shapes(links)
    counts = [math.prod(sizes.values()) for sizes in found]
    assert counts[0] == 1
    assert all(few < many <= LARGEST for few, many in itertools.pairwise(counts))
    assert all(set(sizes) == set(links.sizes) for sizes in found)
    assert links.sizes in found


@pytest.mark.parametrize("shape", ["ddl@1x2", "ddl@4x1", "ddl@1x1"])
def test_along_an_axis_of_one_node_nothing_is_replayed(shape: str) -> None:
    links = topology_named(shape)
    for name, size in links.sizes.items():
        if size == 1:
            assert {sizes[name] for sizes in shapes(links)} == {1}


@pytest.fixture(scope="module")
def dense() -> CompiledStep:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    return compile_step(step, (weights, jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)), "ddl@2x4", "p100")


def by_shape(found: Scaling) -> dict[str, float]:
    return {point.shape: point.efficiency for point in found.points}


@pytest.mark.gpu_aot
def test_overheads_cost_and_are_told(dense: CompiledStep) -> None:
    ideal, usual = dense.scaling(NONE), dense.scaling(Overheads())
    assert by_shape(usual)["1x1"] == pytest.approx(by_shape(ideal)["1x1"], abs=0.02)
    spread = [dense.scaling(Overheads(spread=cv)) for cv in (0.0, 0.01, 0.03)]
    for few, many in itertools.pairwise(spread):
        for less, more in zip(few.points, many.points, strict=True):
            assert more.efficiency <= less.efficiency * (1 + 1e-9)
            assert (more.slowest > less.slowest) == (more.devices > 1)
    assert [one.name for one in usual.assumed] == list(SOURCES)
    assert {one.why for one in usual.assumed} == set(SOURCES.values())
    assert next(one for one in ideal.assumed if one.name == "spread").why == "given"


@pytest.mark.gpu_aot
def test_more_devices_send_more_and_within_a_host_over_its_own_links(dense: CompiledStep) -> None:
    points = dense.scaling(NONE).points
    assert points[0].collective_s == 0
    assert all(few.collective_s <= many.collective_s for few, many in itertools.pairwise(points))
    host = next(point for point in points if point.shape == "1x4")
    link, calls = dense.links.axis("device"), sum(one.times for one in dense.scaling(NONE).collectives)
    nbytes = 4 * WIDTH * WIDTH * 4
    wire_s = 2 * 3 / 4 * nbytes / link.bandwidth
    latencies_s = calls * (6 * link.latency_s + NONE.collective_launch_s)
    assert wire_s <= host.collective_s <= wire_s + latencies_s
    assert by_shape(dense.scaling(NONE))["1x4"] >= by_shape(dense.scaling(NONE))["2x4"]


@pytest.mark.gpu_aot
def test_slower_kernels_hide_more(dense: CompiledStep) -> None:
    fast, slow = dense.scaling(NONE), dense.scaling(Overheads(0, 0.5, 0, NONE.collective_launch_s, 0))
    assert slow.single_s == pytest.approx(2 * fast.single_s)
    for quick, half in zip(fast.points, slow.points, strict=True):
        assert half.efficiency >= quick.efficiency - 1e-9


@pytest.mark.gpu_aot
def test_it_is_told_and_comes_back(dense: CompiledStep) -> None:
    found = dense.scaling(Overheads())
    assert Scaling.from_json(found.to_json()) == found
    assert "spread" in str(found)
    assert "arXiv:2208.11035" in str(found)


@pytest.mark.gpu_aot
def test_compiled_for_one_host_nothing_is_said_of_several() -> None:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    found = simulate(step, (weights, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)), "ddl@1x2", "p100")
    assert [point.shape for point in found.points] == ["1x1", "1x2"]
    assert any("one node of the axis host" in text for text in found.assumptions)
