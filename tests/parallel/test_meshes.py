"""Meshes and the links that go with them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from memplan.errors import MeshError
from memplan.hardware.collectives import Decomposition, Phase, all_reduce_seconds
from memplan.hardware.topology import Topology, topology_named
from memplan.parallel import meshes

ABSTRACT = AbstractMesh((2, 4), ("host", "device"))


def test_by_default_a_mesh_has_hosts_and_their_devices() -> None:
    found = meshes.mesh()
    assert dict(found.shape) == {"host": 1, "device": jax.device_count()}


@pytest.mark.parametrize(
    "sizes",
    [
        {"a": 0},
        {"a": -1},
        {"a": 10_000},
        {"a": -1, "b": -1},
    ],
)
def test_a_mesh_of_other_sizes_than_there_are_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(MeshError, match=r"needs .* devices; there are"):
        meshes.mesh(sizes)


def test_the_innermost_axis_has_the_links_between_devices() -> None:
    preset = topology_named("today")
    found = meshes.links_of(AbstractMesh((2, 3, 4), ("rack", "host", "device")))
    assert found.sizes == {"rack": 2, "host": 3, "device": 4}
    assert [axis.bandwidth for axis in found.axes] == [preset.axes[0].bandwidth] * 2 + [preset.axes[-1].bandwidth]


def test_cpus_share_memory() -> None:
    assert meshes.links_of(jax.make_mesh((1,), ("device",))).axis("device").bandwidth == (
        topology_named("local").axes[-1].bandwidth
    )


@pytest.mark.parametrize("topology", ["ddl@3x5", topology_named("ddl"), "ddl"])
def test_a_topology_takes_the_sizes_of_the_mesh(topology: Any) -> None:
    found = meshes.topology_for(topology, ABSTRACT)
    assert found.sizes == {"host": 2, "device": 4}
    assert found.axis("host").bandwidth == topology_named("ddl").axis("host").bandwidth


@pytest.mark.parametrize("names", [("device", "host"), ("host", "gpu")])
def test_a_topology_with_other_axes_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(MeshError, match=f"has the axes host, device; the mesh has {', '.join(names)}"):
        meshes.topology_for("ddl", AbstractMesh((2, 4), names))


def test_a_mesh_loses_its_types_and_nothing_else() -> None:
    typed = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    for one in (typed, AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
        found = meshes.untyped(one)
        assert type(found) is type(one) and dict(found.shape) == dict(one.shape)
        assert set(found.axis_types) == {AxisType.Auto}
    assert meshes.untyped(typed).devices is not None


def test_arrays_over_a_typed_mesh_are_typed() -> None:
    spec = jax.sharding.PartitionSpec("d")
    for kind, typed in ((AxisType.Explicit, True), (AxisType.Auto, False)):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
        assert meshes.is_typed(jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, spec))) == typed
    assert not meshes.is_typed(jnp.ones(2)) and not meshes.is_typed(3.0)


def measured(known: Topology, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """What would be measured where all-reduces take what the cost model says."""

    def seconds(mesh: Any, axis: str, nbytes: int) -> float:
        return all_reduce_seconds(known, Decomposition((Phase((axis,), False),)), nbytes)

    monkeypatch.setattr(meshes, "_seconds", seconds)
    devices = np.full(tuple(known.sizes.values()), SimpleNamespace(device_kind="chip"))
    mesh: Any = SimpleNamespace(shape=known.sizes, devices=devices)
    return meshes.measure_topology(mesh, "mine")


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
    monkeypatch.setattr(meshes, "_seconds", None)
    found = meshes.measure_topology(jax.make_mesh((1, 1), ("host", "device")))
    assert [(axis.size, axis.latency_s, axis.shared) for axis in found.axes] == [(1, 0.0, True), (1, 0.0, False)]
