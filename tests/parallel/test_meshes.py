"""Meshes and the links that go with them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from memplan.errors import MeshError, TopologyError
from memplan.hardware.collectives import all_reduce_seconds
from memplan.hardware.machine import Machine
from memplan.hardware.topology import Topology, topology_named
from memplan.parallel import meshes
from memplan.program import compat
from tests.hardware.machines import on


def test_by_default_a_mesh_has_hosts_and_their_devices() -> None:
    mesh = meshes.mesh()
    assert dict(mesh.shape) == {"host": 1, "device": jax.device_count()}


@pytest.mark.parametrize("sizes", [{"a": 0}, {"a": -1}, {"a": 10_000}, {"a": -1, "b": -1}])
def test_a_mesh_of_impossible_sizes_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(MeshError, match=r"needs .* devices; there are"):
        meshes.mesh(sizes)


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        (None, "today@2x4"),
        ("2x4", "today@2x4"),
        ("4x2", "today@4x2"),
        ("ddl@4x2", "ddl@4x2"),
        ("ddl", "ddl@2x4"),
        (topology_named("ddl"), "ddl@2x4"),
        (topology_named("local@1x8"), "local@1x8"),
        (topology_named("ddl@2x3"), "ddl@1x8"),  # hosts of three make no eight
    ],
)
def test_a_topology_has_as_many_devices_as_the_step(topology: Any, name: str) -> None:
    assert meshes.topology_for(topology, 8, 4, "today") == topology_named(name)


def test_a_shape_is_not_resized() -> None:
    assert meshes.topology_for("ddl@2x3", 8, 4, "today").devices == 6
    with pytest.raises(
        TopologyError, match=r"'today@2x3' has 6 devices; the program runs on 8\. .* as '1x8'"
    ):
        meshes.machine_of(ABSENT, "2x3", described=True)


ABSENT = compat.Division(8, None, (), ())


def division(*devices: tuple[int, int], platform: str = "cpu") -> compat.Division:
    """A division over devices with these processes and numbers."""
    all_devices = tuple(
        SimpleNamespace(process_index=process, id=number, platform=platform)
        for process, number in devices
    )
    return compat.Division(len(all_devices), all_devices, (), ())


@pytest.mark.parametrize(
    ("count", "shape"), [(8, "1x8"), (16, "2x8"), (12, "2x6"), (2, "1x2"), (7, "1x7")]
)
def test_described_devices_stand_up_to_eight_on_a_host(count: int, shape: str) -> None:
    machine = meshes.machine_of(compat.Division(count, None, (), ()), None, described=True)
    assert machine == on(topology_named(f"today@{shape}"), count)


@pytest.mark.parametrize(
    ("topology", "described", "assumed"),
    [
        (None, True, "hosts and links"),
        (None, False, "links"),  # the processes are the hosts
        ("2x2", True, "links"),
        ("today@2x2", True, ""),
        (topology_named("today@2x2"), True, ""),
    ],
)
def test_what_nobody_described_is_assumed(topology: Any, described: bool, assumed: str) -> None:
    devices = division((0, 0), (0, 1), (1, 2), (1, 3))
    assert meshes.machine_of(devices, topology, described=described).assumed == assumed


def test_described_devices_replace_those_of_the_step() -> None:
    shuffled = division((0, 3), (0, 1), (0, 2), (0, 0))
    assert meshes.machine_of(shuffled, "2x2", described=True).devices == (3, 1, 2, 0)


@pytest.mark.parametrize(
    ("devices", "platform", "machine"),
    [
        (
            ((1, 6), (0, 0), (1, 4), (0, 1)),
            "cpu",
            Machine(topology_named("local@2x2"), (3, 0, 2, 1)),
        ),
        (((0, 0), (0, 1)), "cuda", on(topology_named("today@1x2"), 2)),
        (((0, 0), (0, 1), (1, 2)), "cpu", on(topology_named("local@1x3"), 3)),
    ],
    ids=["processes are hosts", "GPUs of one machine", "unequal numbers are one host"],
)
def test_devices_have_a_machine(devices: Any, platform: str, machine: Machine) -> None:
    assert (
        meshes.machine_of(division(*devices, platform=platform), None, described=False) == machine
    )


def test_slices_are_hosts_where_each_gpu_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        SimpleNamespace(process_index=number, id=number, slice_index=number // 2, platform="cuda")
        for number in range(4)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    machine = meshes.machine_of(compat.Division(4, tuple(devices), (), ()), None, described=False)
    assert machine == on(topology_named("today@2x2"), 4)


def measured(links: Topology, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """The measured topology if all-reduces take as long as the cost model says."""

    def seconds(mesh: Any, axis: str, nbytes: int) -> float:
        return all_reduce_seconds(links, (axis,), nbytes)

    monkeypatch.setattr(meshes, "_seconds", seconds)
    devices = np.full(tuple(links.sizes.values()), SimpleNamespace(device_kind="chip"))
    mesh: Any = SimpleNamespace(shape=links.sizes, devices=devices)
    return meshes.measure_topology(mesh, "mine")


@pytest.mark.parametrize("name", ["ddl@2x4", "ddl@8x2", "today@4x8"])
def test_measuring_finds_the_topology_of_the_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = topology_named(name)
    topology = measured(links, monkeypatch)
    assert topology.name == "mine" and topology.sizes == links.sizes
    for axis, expected in zip(topology.axes, links.axes, strict=True):
        assert axis.latency_s == pytest.approx(expected.latency_s, rel=0.05, abs=1e-6)
        assert axis.bandwidth == pytest.approx(expected.bandwidth, rel=0.01)


def test_faster_than_its_launch_is_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    links = topology_named("ddl@1x4")
    fast = replace(
        links, axes=(links.axes[0], replace(links.axes[1], latency_s=0.0, bandwidth=1e15))
    )
    topology = measured(fast, monkeypatch)
    assert all(axis.latency_s >= 0 and axis.bandwidth > 0 for axis in topology.axes)


def test_an_axis_of_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "_seconds", None)
    topology = meshes.measure_topology(jax.make_mesh((1, 1), ("host", "device")))
    axes = [(axis.size, axis.latency_s, axis.shared) for axis in topology.axes]
    assert axes == [(1, 0.0, True), (1, 0.0, False)]
