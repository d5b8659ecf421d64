"""The devices of a collective's first group, in every notation that HLO has."""

from __future__ import annotations

import pytest
from memplan.xla.collective_cost import first_group

from memplan.errors import UnsupportedProgramError

LISTED = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum": (0, 1, 2, 3),
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": (0, 4),
    "replica_groups={}": (),
    "replica_groups={{}}": (),
    "to_apply=%sum": (),
}
COUNTED = {
    "replica_groups=[2,4]<=[8], use_global_device_ids=true": (0, 1, 2, 3),
    "replica_groups=[4,2]<=[2,4]T(1,0)": (0, 4),
    "replica_groups=[1,8]<=[8]": (0, 1, 2, 3, 4, 5, 6, 7),
    "replica_groups=[4,2]<=[2,2,2]T(0,2,1)": (0, 2),
    "replica_groups=[2,4]<=[2,2,2]T(2,0,1)": (0, 2, 4, 6),
}
MESHED = {  # as jax 0.11 has it
    "replica_groups=mesh['host'=2,'device'=4] {'host'}, use_global_device_ids=true": (0, 4),
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": (0, 1, 2, 3),
    "replica_groups=mesh['host'=2,'device'=4] {'host','device'}": (0, 1, 2, 3, 4, 5, 6, 7),
    "replica_groups=mesh['x'=8] {'x':(1)2}": (0, 4),
    "replica_groups=mesh['x'=8] {'x':(2)4}": (0, 1, 2, 3),
    "replica_groups=mesh['x'=8] {'x':(2)2}": (0, 2),
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": (0, 4),
    "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}": (0, 1),
    "replica_groups=mesh['host'=2,'device'=4] {'device':(2)2}": (0, 1),
    "replica_groups=mesh['host'=2,'device'=4] {'device':(1)2}": (0, 2),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}": (3, 2),
    "replica_groups=mesh['host'=2,'device'=4] {}": (0,),
}


@pytest.mark.parametrize(("attributes", "devices"), [*LISTED.items(), *COUNTED.items(), *MESHED.items()])
def test_the_first_group(attributes: str, devices: tuple[int, ...]) -> None:
    assert first_group(attributes) == devices


def test_a_notation_that_is_not_known_is_an_error() -> None:
    with pytest.raises(UnsupportedProgramError, match="version of jax"):
        first_group("replica_groups=<0,4>, to_apply=%sum")
