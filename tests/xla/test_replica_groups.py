"""The replica groups of a collective, in every notation that HLO has."""

import pytest

from memplan.errors import UnsupportedProgramError
from memplan.hardware.machine import Groups
from tests.hlo import groups_text, read_instruction

ALL = (tuple(range(8)),)
ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
EACH = tuple((device,) for device in range(8))
LISTED = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ROWS,
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": COLUMNS,
    "replica_groups={{7,0},{1,2,3,4,5,6}}": ((7, 0), (1, 2, 3, 4, 5, 6)),
    "replica_groups={}": ALL,
    "replica_groups={{}}": ALL,
}
COUNTED = {
    "replica_groups=[2,4]<=[8]": ROWS,
    "replica_groups=[4,2]<=[2,4]T(1,0)": COLUMNS,
    "replica_groups=[1,8]<=[8]": ALL,
    "replica_groups=[8,1]<=[8]": EACH,
    "replica_groups=[4,2]<=[2,2,2]T(0,2,1)": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups=[2,4]<=[2,2,2]T(2,0,1)": ((0, 2, 4, 6), (1, 3, 5, 7)),
}
MESHED = {  # as jax 0.11 has it
    "replica_groups=mesh['host'=2,'device'=4] {'host'}": COLUMNS,
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": ROWS,
    "replica_groups=mesh['host'=2,'device'=4] {'host','device'}": ALL,
    "replica_groups=mesh['x'=8] {'x':(1)2}": COLUMNS,
    "replica_groups=mesh['x'=8] {'x':(2)4}": ROWS,
    "replica_groups=mesh['x'=8] {'x':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": COLUMNS,
    "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}": (
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ),
    "replica_groups=mesh['host'=2,'device'=4] {'device':(2)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "replica_groups=mesh['host'=2,'device'=4] {'device':(1)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}": ((3, 2), (1, 0)),
    "replica_groups=mesh['host'=2,'device'=4] {}": EACH,
}


def groups_of(attributes: str) -> Groups:
    return read_instruction(f"  %s = f32[8] all-reduce(%a), {attributes}, to_apply=%add").groups(8)


def pairs_of(attributes: str) -> tuple[tuple[int, int], ...]:
    return read_instruction(
        f"  %s = f32[8] collective-permute(%a), {attributes}"
    ).source_target_pairs


@pytest.mark.parametrize(
    ("attributes", "groups"), [*LISTED.items(), *COUNTED.items(), *MESHED.items()]
)
def test_all_groups(attributes: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert groups_of(attributes) == groups
    assert groups_of(f"replica_groups={groups_text(groups)}") == groups


def test_a_notation_that_is_not_known_is_an_error() -> None:
    op = read_instruction("  %s = f32[8] all-reduce(%a), replica_groups={{0,1}}, to_apply=%add")
    op.message.collective_device_list.ParseFromString(b"\x7a\x01x")  # a field of another release
    op.message.ClearField("replica_groups")
    with pytest.raises(UnsupportedProgramError, match="version of jax"):
        op.groups(8)


def test_pairs_of_a_permute() -> None:
    attributes = "channel_id=3, source_target_pairs={{0,1},{1,2},{7,0}}"
    assert pairs_of(attributes) == ((0, 1), (1, 2), (7, 0))
    assert pairs_of("source_target_pairs={}") == ()
