"""Meshes and the links that go with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from memplan.errors import MeshError
from memplan.hardware.topology import topology_named
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
