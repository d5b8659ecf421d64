from __future__ import annotations

import pytest

from memplan.errors import UnsupportedProgramError
from memplan.planning.collectives import Decomposition, Phase, all_gather_seconds, all_reduce_seconds
from memplan.planning.topology import topology_named
from memplan.program.network import Collective, Network

NETWORK = Network(topology_named("ddl@2x4"), topology_named("ddl@2x4"))
LISTED = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum": ("device",),
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ("host",),
    "replica_groups={{0,1,2,3,4,5,6,7}}": ("host", "device"),
    "replica_groups={}": ("host", "device"),
}
COUNTED = {
    "replica_groups=[2,4]<=[8], use_global_device_ids=true": ("device",),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ("host",),
    "replica_groups=[1,8]<=[8]": ("host", "device"),
}
MESHED = {  # as jax 0.11 has it
    "replica_groups=mesh['host'=2,'device'=4] {'host'}, use_global_device_ids=true": ("host",),
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": ("device",),
    "replica_groups=mesh['host'=2,'device'=4] {'host','device'}": ("host", "device"),
    "replica_groups=mesh['x'=8] {'x'}": ("host", "device"),
    "replica_groups=mesh['x'=8] {'x':(1)2}": ("host",),
    "replica_groups=mesh['x'=8] {'x':(2)4}": ("device",),
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": ("host",),
    "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}": ("device",),
    "replica_groups=mesh['host'=2,'device'=4] {}": (),
}


@pytest.mark.parametrize(("attributes", "axes"), [*LISTED.items(), *COUNTED.items(), *MESHED.items()])
def test_the_axes_of_a_collective_are_those_along_which_its_devices_differ(
    attributes: str, axes: tuple[str, ...]
) -> None:
    assert NETWORK.axes(attributes) == axes


def test_a_notation_that_is_not_known_is_an_error() -> None:
    with pytest.raises(UnsupportedProgramError, match="version of jax"):
        NETWORK.axes("replica_groups=<0,4>, to_apply=%sum")


def test_a_collective_takes_what_the_links_take() -> None:
    alone = Decomposition((Phase(("host",), False),))
    reduce = NETWORK.collective("all-reduce", "replica_groups={{0,4},{1,5}}", 1 << 20, 1 << 20)
    assert reduce == Collective("all-reduce", ("host",), 1 << 20)
    assert NETWORK.seconds(reduce) == all_reduce_seconds(NETWORK.links, alone, 1 << 20)
    gather = NETWORK.collective("all-gather", "replica_groups={{0,4},{1,5}}", 1 << 19, 1 << 20)
    assert NETWORK.seconds(gather) == all_gather_seconds(NETWORK.links, alone, 1 << 20)


def test_a_group_of_one_takes_nothing() -> None:
    assert NETWORK.seconds(NETWORK.collective("all-reduce", "replica_groups={{0},{1}}", 8, 8)) == 0


def test_on_other_sizes_the_same_collective_takes_another_time() -> None:
    wide = Network(topology_named("ddl@2x4"), topology_named("ddl@64x4"))
    alone = Network(topology_named("ddl@2x4"), topology_named("ddl@1x4"))
    reduce = wide.collective("all-reduce", "replica_groups={{0,4},{1,5}}", 1 << 20, 1 << 20)
    assert wide.seconds(reduce) > NETWORK.seconds(reduce) > alone.seconds(reduce) == 0
