"""The notations that HLO has for the devices of a collective, on lines as XLA prints them."""

from __future__ import annotations

import pytest

from memplan.errors import UnsupportedProgramError
from memplan.xla.replica_groups import first_group


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [
        ("channel_id=1, to_apply=%add", ()),
        ("replica_groups={}", ()),
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[2,4]<=[2,2,2]T(2,0,1)", (0, 2, 4, 6)),
        ("replica_groups=mesh['host'=2,'device'=4] {'device'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['host'=2,'device'=4] {'host'}", (0, 4)),
        ("replica_groups=mesh['host'=2,'device'=4] {'device':(2)2}", (0, 1)),
        ("replica_groups=mesh['host'=2,'device'=4] {'device':(1)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", (3, 2)),
    ],
)
def test_the_first_group(attributes: str, devices: tuple[int, ...]) -> None:
    assert first_group(attributes) == devices


def test_another_notation_is_refused_with_its_text() -> None:
    with pytest.raises(UnsupportedProgramError, match="replica_groups=some"):
        first_group("replica_groups=some")
