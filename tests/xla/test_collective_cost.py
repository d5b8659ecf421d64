from __future__ import annotations

import pytest
from memplan.xla.collective_cost import Collective, Interconnect

from memplan.hardware.collectives import Decomposition, Phase, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.topology import topology_named

INTERCONNECT = Interconnect(topology_named("ddl@2x4"), topology_named("ddl@2x4"))
AXES = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum": ("device",),
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ("host",),
    "replica_groups={{0,1,2,3,4,5,6,7}}": ("host", "device"),
    "replica_groups={}": ("host", "device"),
    "replica_groups=mesh['host'=2,'device'=4] {}": (),
}


@pytest.mark.parametrize(("attributes", "axes"), AXES.items())
def test_the_axes_of_a_collective_are_those_along_which_its_devices_differ(
    attributes: str, axes: tuple[str, ...]
) -> None:
    assert INTERCONNECT.axes(attributes) == axes


def test_a_collective_takes_what_the_links_take() -> None:
    alone = Decomposition((Phase(("host",), False),))
    reduce = INTERCONNECT.collective("all-reduce", "replica_groups={{0,4},{1,5}}", 1 << 20, 1 << 20)
    assert reduce == Collective("all-reduce", ("host",), 1 << 20)
    assert INTERCONNECT.seconds(reduce) == all_reduce_seconds(INTERCONNECT.links, alone, 1 << 20)
    gather = INTERCONNECT.collective("all-gather", "replica_groups={{0,4},{1,5}}", 1 << 19, 1 << 20)
    assert INTERCONNECT.seconds(gather) == reduce_scatter_seconds(INTERCONNECT.links, alone, 1 << 20)


def test_a_group_of_one_takes_nothing() -> None:
    assert INTERCONNECT.seconds(INTERCONNECT.collective("all-reduce", "replica_groups={{0},{1}}", 8, 8)) == 0


def test_on_other_sizes_the_same_collective_takes_another_time() -> None:
    wide = Interconnect(topology_named("ddl@2x4"), topology_named("ddl@64x4"))
    alone = Interconnect(topology_named("ddl@2x4"), topology_named("ddl@1x4"))
    reduce = wide.collective("all-reduce", "replica_groups={{0,4},{1,5}}", 1 << 20, 1 << 20)
    assert wide.seconds(reduce) > INTERCONNECT.seconds(reduce) > alone.seconds(reduce) == 0


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("opcode", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
def test_replayed_within_one_host_nothing_goes_over_the_interconnect(devices: int, opcode: str) -> None:
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}"
    inside, across = (
        Interconnect(INTERCONNECT.compiled_for, topology_named(shape))
        for shape in (f"ddl@1x{devices}", f"ddl@{devices}x1")
    )
    one = inside.collective(opcode, groups, 1 << 28, 1 << 28)
    assert one.axes == ("host", "device")
    link = inside.links.axis("device")
    least_s = (devices - 1) / devices * one.nbytes / link.bandwidth
    assert least_s < inside.seconds(one) < 2.01 * least_s < across.seconds(one)


def test_compiled_for_one_host_the_groups_are_those_of_its_devices() -> None:
    single = topology_named("ddl@1x2")
    interconnect = Interconnect(single, single)
    assert interconnect.axes("replica_groups={{0,1}}") == interconnect.axes("replica_groups={}") == ("device",)
