"""What collectives take on the links of a machine: axes, bytes that hosts and devices send, seconds."""

import pytest

from memplan.hardware.collectives import LAUNCH_S, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.machine import Machine
from memplan.hardware.topology import topology_named
from memplan.xla.collectives.cost import Collective, collective, is_collective
from tests.hardware.machines import on
from tests.hlo import read_instruction

DDL = topology_named("ddl@2x4")
MACHINE = on(DDL, 8)
NBYTES = 1 << 20
ALL, HOSTS, DEVICES = (
    "replica_groups={{0,1,2,3,4,5,6,7}}",
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "replica_groups={{0,1,2,3},{4,5,6,7}}",
)
REQUIRED = {  # by XLA's parser
    "all-reduce": "to_apply=%add",
    "all-gather": "dimensions={0}",
    "all-gather-start": "dimensions={0}",
    "collective-permute": "channel_id=1",
    "collective-permute-start": "channel_id=1",
    "reduce-scatter": "dimensions={0}, to_apply=%add",
    "all-to-all": "dimensions={0}",
}
AXES = {
    DEVICES: ("device",),
    HOSTS: ("host",),
    ALL: ("host", "device"),
    "replica_groups={}": ("host", "device"),
    "replica_groups=mesh['host'=2,'device'=4] {}": (),
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": ("device",),
}


def of(
    opcode: str, attributes: str, nbytes: int = NBYTES, machine: Machine = MACHINE
) -> Collective:
    line = f"  %c = u8[{nbytes}] {opcode}(%a), {attributes}"
    return collective(machine, read_instruction(f"{line}, {REQUIRED[opcode]}"), nbytes)


@pytest.mark.parametrize(("attributes", "axes"), AXES.items())
def test_the_axes_of_a_collective_are_those_along_which_its_devices_differ(
    attributes: str, axes: tuple[str, ...]
) -> None:
    assert of("all-reduce", attributes).axes == axes


def test_partitions_stand_where_the_machine_says() -> None:
    turned = Machine(DDL, (0, 4, 1, 5, 2, 6, 3, 7))  # partitions 0, 2, 4, 6 on the first host
    assert of("all-reduce", "replica_groups={{0,2,4,6},{1,3,5,7}}", machine=turned).axes == (
        "device",
    )
    assert of("all-reduce", HOSTS, machine=turned).axes == ("device",)
    assert of("all-reduce", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", machine=turned).axes == (
        "host",
    )


@pytest.mark.parametrize("attributes", [ALL, HOSTS, DEVICES])
def test_a_collective_takes_what_the_links_of_its_group_take(attributes: str) -> None:
    reduce = of("all-reduce", attributes)
    links = MACHINE.links(
        tuple(
            map(
                tuple,
                {ALL: [range(8)], HOSTS: [(0, 4), (1, 5), (2, 6), (3, 7)]}.get(
                    attributes, [(0, 1, 2, 3), (4, 5, 6, 7)]
                ),
            )
        )
    )
    assert reduce.seconds == all_reduce_seconds(links, reduce.axes, NBYTES)
    line = f"  %g = u8[{NBYTES}] all-gather-start(%a), {attributes}, dimensions={{0}}"
    gather = collective(MACHINE, read_instruction(line), NBYTES // 8)
    assert (gather.kind, gather.nbytes) == ("all-gather", NBYTES)
    assert gather.seconds == reduce_scatter_seconds(links, reduce.axes, NBYTES)


def test_groups_beside_each_other_share_the_link_of_their_host() -> None:
    one_group = of("all-reduce", "replica_groups={{0,4},{1},{2},{3},{5},{6},{7}}")
    four_groups = of("all-reduce", HOSTS)
    assert one_group.seconds < four_groups.seconds
    network = DDL.axis("host").bandwidth
    assert four_groups.seconds - one_group.seconds == pytest.approx(3 * NBYTES / network)
    assert four_groups.outside_nbytes == 4 * one_group.outside_nbytes == 4 * NBYTES


def test_bytes_that_a_host_and_a_device_send() -> None:
    everyone = of("all-reduce", ALL)
    assert everyone.outside_nbytes == everyone.inside_nbytes == 2 * NBYTES * 7 / 8
    for opcode in ("reduce-scatter", "all-gather"):
        cost = of(opcode, ALL)
        assert (cost.outside_nbytes, cost.inside_nbytes) == (NBYTES * 7 / 8, NBYTES * 7 / 8)
    assert of("all-reduce", DEVICES).outside_nbytes == of("all-reduce", HOSTS).inside_nbytes == 0
    # 4 devices of a host send 4 of 8 parts out, and 3 to each other
    exchanged = of("all-to-all", ALL)
    assert (exchanged.outside_nbytes, exchanged.inside_nbytes) == (
        4 * NBYTES * 4 / 8,
        NBYTES * 3 / 8,
    )


def test_a_permute_takes_what_its_busiest_link_takes() -> None:
    around = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
    ring = of("collective-permute-start", around)
    host, device = DDL.axes
    assert ring.axes == ("host", "device")
    assert (ring.outside_nbytes, ring.inside_nbytes) == (NBYTES, NBYTES)
    assert ring.seconds == LAUNCH_S + max(
        axis.latency_s + NBYTES / axis.bandwidth for axis in (host, device)
    )
    across = of("collective-permute", "source_target_pairs={{0,4},{1,5},{2,6},{3,7}}")
    assert across.axes == ("host",) and across.outside_nbytes == 4 * NBYTES
    assert across.seconds == pytest.approx(LAUNCH_S + host.latency_s + 4 * NBYTES / host.bandwidth)
    assert of("collective-permute", "source_target_pairs={{0,1}}").axes == ("device",)


def test_an_exchange_takes_what_the_network_takes() -> None:
    cost = of("all-to-all", ALL, 1 << 28)
    network = DDL.axis("host")
    assert cost.seconds == LAUNCH_S + network.latency_s + 2 * (1 << 28) / network.bandwidth


@pytest.mark.parametrize("opcode", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
def test_a_group_of_one_takes_nothing(opcode: str) -> None:
    cost = of(opcode, "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}")
    assert (cost.seconds, cost.outside_nbytes, cost.inside_nbytes) == (0, 0, 0)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("opcode", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
def test_within_one_host_nothing_goes_over_the_network(devices: int, opcode: str) -> None:
    inside, across = (
        on(topology_named(f"ddl@{shape}"), devices) for shape in (f"1x{devices}", f"{devices}x1")
    )
    device_cost, host_cost = (
        of(opcode, "replica_groups={}", 1 << 28, machine) for machine in (inside, across)
    )
    assert (device_cost.axes, host_cost.axes) == (("device",), ("host",))
    least_s = (devices - 1) / devices * device_cost.nbytes / DDL.axis("device").bandwidth
    assert least_s < device_cost.seconds < 2.01 * least_s < host_cost.seconds
    assert device_cost.outside_nbytes == host_cost.inside_nbytes == 0


def test_which_operations_are_collectives() -> None:
    assert all(
        map(
            is_collective,
            ("all-reduce", "all-gather-start", "ragged-all-to-all", "collective-permute"),
        )
    )
    assert not any(map(is_collective, ("all-gather-done", "fusion", "reduce", "async-start")))
