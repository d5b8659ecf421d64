"""Topologies: presets that follow from nominal figures, files that come back as they were, and errors that help."""

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from memplan.errors import TopologyError
from memplan.hardware.topology import TOPOLOGIES, Axis, Topology, topology_named

DDL = topology_named("ddl")
THREE = Topology(
    "mine",
    "racks",
    (Axis("rack", 2, 1e-5, 1e9), Axis("host", 3, 0, 10**10), Axis("device", 4, 0.0, 1e11, False)),
    (),
)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_preset_is_complete(name: str) -> None:
    preset = topology_named(name)
    assert preset.name == name and preset.description and preset.sources and all(preset.sources)
    assert any("ssumed" in source for source in preset.sources), "latencies are assumptions"
    assert list(preset.sizes) == ["host", "device"]
    host, device = preset.axes
    assert host.shared and not device.shared
    assert host.bandwidth < device.bandwidth and host.latency_s > device.latency_s > 0


def test_ddl_is_the_published_machine() -> None:
    assert DDL.devices == 256 and DDL.sizes == {"host": 64, "device": 4}
    assert DDL.axis("host").bandwidth == pytest.approx(0.8 * 100e9 / 8)
    assert DDL.axis("device").bandwidth == pytest.approx(0.8 * 2 * 20e9)


def test_today_is_hosts_of_eight_with_one_network_link() -> None:
    today = topology_named("today")
    assert today.devices == 256 and today.sizes == {"host": 32, "device": 8}
    assert today.axis("host").bandwidth == pytest.approx(0.8 * 400e9 / 8)
    assert today.axis("device").bandwidth == pytest.approx(0.8 * 900e9 / 2)


def test_names_work_in_any_case_and_in_other_sizes() -> None:
    assert topology_named(" DDL ") == DDL == topology_named("ddl@64x4")
    small = topology_named("DDL@16x2")
    assert (small.name, small.devices, small.sizes) == ("ddl@16x2", 32, {"host": 16, "device": 2})
    assert topology_named(small.name) == small
    assert dataclasses.replace(small, name="ddl", axes=DDL.axes) == DDL


def test_resized_keeps_the_links() -> None:
    large = THREE.resized({"rack": 5})
    assert (large.name, large.devices) == ("mine@5x3x4", 60)
    assert large.axes == (dataclasses.replace(THREE.axes[0], size=5), *THREE.axes[1:])
    assert large.resized({"rack": 2, "device": 8}).name == "mine@2x3x8"
    assert THREE.resized({}) is THREE and THREE.resized({"host": 3}) is THREE
    with pytest.raises(TopologyError, match=r"no axis 'hosts'\. Did you mean host"):
        THREE.resized({"hosts": 3})
    with pytest.raises(TopologyError, match="size 0"):
        THREE.resized({"host": 0})


def test_axes_know_what_is_in_them() -> None:
    assert [axis.name for axis in THREE.inside("rack")] == ["host", "device"]
    assert THREE.inside("device") == ()
    with pytest.raises(TopologyError, match="Its axes: rack, host, device"):
        THREE.axis("card")


@pytest.mark.parametrize(
    "shape", ["", "4", "4x", "x4", "4x4x4", "4x-4", "4.0x4", "4 x4", "²x4", "1" * 5000 + "x4"]
)
def test_a_shape_that_does_not_fit_says_which_axes_there_are(shape: str) -> None:
    with pytest.raises(TopologyError, match=r"host, device.*'ddl@64x4'"):
        topology_named(f"ddl@{shape}")
    with pytest.raises(TopologyError, match="size 0"):
        topology_named("ddl@0x4")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"name": ""}, "not the name of an axis"),
        ({"name": 3}, "not the name of an axis"),
        ({"size": 0}, "has size 0"),
        ({"size": 2.0}, "has size 2.0"),
        ({"size": True}, "has size True"),
        ({"latency_s": -1e-6}, "latency of -1e-06"),
        ({"latency_s": math.nan}, "latency of nan"),
        ({"latency_s": "fast"}, "latency of 'fast'"),
        ({"bandwidth": 0}, "bandwidth of 0"),
        ({"bandwidth": math.inf}, "bandwidth of inf"),
        ({"bandwidth": 10**400}, "bandwidth of 1000"),
        ({"shared": 1}, "'shared' of the axis 'host' is 1"),
    ],
)
def test_an_axis_that_is_none_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Axis(**{"name": "host", "size": 2, "latency_s": 0.0, "bandwidth": 1e9, **entries})


def test_a_topology_has_axes_of_different_names() -> None:
    axis = Axis("host", 2, 0.0, 1e9)
    with pytest.raises(TopologyError, match="several axes 'host'"):
        Topology("twice", "", (axis, dataclasses.replace(axis, size=3)), ())
    with pytest.raises(TopologyError, match="no axes"):
        Topology("nothing", "", (), ())


def test_nothing_can_be_changed() -> None:
    for frozen in (DDL, DDL.axes[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.name = "other"  # type: ignore[misc]


def test_jax_is_not_imported() -> None:
    program = "import sys, memplan.hardware.collectives, memplan.hardware.machine; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
