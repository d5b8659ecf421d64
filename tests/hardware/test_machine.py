"""Coordinates of partitions, groups along levels, and links of groups, against brute force."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import TopologyError
from memplan.hardware.machine import Groups, Machine
from memplan.hardware.topology import Axis, Topology, topology_named
from tests.hardware.machines import on

RACKS = Topology(
    "racks",
    "",
    (Axis("rack", 2, 1e-5, 1e9), Axis("host", 2, 1e-6, 8e9), Axis("device", 4, 1e-7, 1e11, False)),
    (),
)
FLAT = on(topology_named("ddl@2x4"), 8)
DEEP = on(RACKS, 16)


def sizes_of(machine: Machine, groups: Groups) -> list[int]:
    return [axis.size for axis in machine.links(groups).axes]


def test_a_topology_of_another_size_is_refused_with_one_that_fits() -> None:
    with pytest.raises(
        TopologyError, match=r"'ddl@2x4' has 8 devices; the program runs on 12\. .* as '2x6'"
    ):
        on(topology_named("ddl@2x4"), 12)
    with pytest.raises(TopologyError):
        Machine(topology_named("ddl@1x2"), (0, 0))


def test_places_count_every_level_from_0() -> None:
    assert [DEEP.coordinates[n] for n in (0, 5, 15)] == [(0, 0, 0), (0, 1, 1), (1, 1, 3)]
    assert DEEP.hosts()[4:9] == ((0, 1),) * 4 + ((1, 0),)
    turned = Machine(RACKS, tuple(reversed(range(16))))
    assert turned.coordinates == tuple(reversed(DEEP.coordinates))


@pytest.mark.parametrize(
    ("groups", "sizes", "rows"),
    [
        (((0, 1, 2, 3, 4, 5, 6, 7),), (2, 4), ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (((0, 4), (1, 5)), (2, 1), ((0, 4), (1, 5))),
        (((3, 2, 1, 0),), (1, 4), ((0, 1, 2, 3),)),
        (((6, 0, 2, 4), (1, 3, 5, 7)), (2, 2), ((0, 2, 4, 6), (1, 3, 5, 7))),  # a part of an axis
    ],
)
def test_even_groups_make_a_grid(groups: Groups, sizes: tuple[int, ...], rows: Groups) -> None:
    grid = FLAT.grid(groups)
    assert grid.sizes == sizes and grid.rows == rows


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1, 4),),  # two of one host and one of the other
        ((0, 1, 2), (4, 5, 6, 7)),
        ((0, 1), (2, 6)),  # one within a host, one across
    ],
)
def test_uneven_groups_make_none(groups: Groups) -> None:
    assert FLAT.grid(groups) is None


def test_groups_of_three_levels() -> None:
    whole = (tuple(range(16)),)
    grid = DEEP.grid(whole)
    assert grid.sizes == (2, 2, 4)
    assert grid.along((2,)) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert grid.along((0,)) == tuple((number, number + 8) for number in range(8))
    assert grid.along((0, 1)) == tuple((n, n + 4, n + 8, n + 12) for n in range(4))
    assert grid.along(()) == tuple((number,) for number in range(16))
    assert grid.along((0, 1, 2)) == whole


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shared = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    axes = tuple(
        Axis(f"level{at}", size, 10.0**-at, 8e9, is_shared)
        for at, (size, is_shared) in enumerate(zip(sizes, shared, strict=True))
    )
    return Machine(
        Topology("drawn", "", axes, ()), tuple(draw(st.permutations(range(math.prod(sizes)))))
    )


@st.composite
def machines_and_groups(draw: st.DrawFn) -> tuple[Machine, Groups]:
    machine = draw(machines())
    order = draw(st.permutations(range(len(machine.devices))))
    count = len(order)
    size = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    return machine, tuple(tuple(order[at : at + size]) for at in range(0, len(order), size))


@given(machines_and_groups())
def test_groups_along_levels_differ_there_alone(drawn: tuple[Machine, Groups]) -> None:
    machine, groups = drawn
    grid = machine.grid(groups)
    if grid is None:
        return
    assert {frozenset(row) for row in grid.rows} == set(map(frozenset, groups))
    levels = range(len(grid.sizes))
    subsets = (itertools.combinations(levels, count) for count in range(4))
    for subset in itertools.chain.from_iterable(subsets):
        along = grid.along(subset)
        partitions = sorted(itertools.chain(*grid.rows))
        assert sorted(itertools.chain(*along)) == partitions, "each partition is in one"
        for group in along:
            (row,) = (row for row in grid.rows if set(group) <= set(row))
            coordinates = [_digits(row.index(partition), grid.sizes) for partition in group]
            differing = {level for level in levels if len({at[level] for at in coordinates}) > 1}
            assert differing <= set(subset)
            assert len(group) == math.prod(grid.sizes[level] for level in subset)
            assert list(group) == sorted(group, key=lambda partition: machine.devices[partition])


def _digits(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for size in reversed(sizes):
        digits.append(number % size)
        number //= size
    return tuple(reversed(digits))


@given(machines_and_groups())
def test_a_grid_is_found_exactly_where_groups_are_even(drawn: tuple[Machine, Groups]) -> None:
    machine, groups = drawn
    levels = range(len(machine.topology.axes) + 1)
    group_nodes = [[machine.coordinates[partition] for partition in group] for group in groups]
    counts = []
    for nodes in group_nodes:
        reached = [Counter(node[:level] for node in nodes).values() for level in levels]
        counts.append(tuple(map(Counter, reached)))
    even = all(len(sizes) == 1 for group_counts in counts for sizes in group_counts)
    even = even and all(group_counts == counts[0] for group_counts in counts)
    nodes = [len({node[:level] for node in group_nodes[0]}) for level in levels]
    even = even and all(inner % outer == 0 for outer, inner in itertools.pairwise(nodes))
    assert (machine.grid(groups) is not None) == even


@given(machines_and_groups())
def test_links_of_groups(drawn: tuple[Machine, Groups]) -> None:
    machine, groups = drawn
    for level, axis in enumerate(machine.links(groups).axes):
        children = 1
        sharing = Counter[tuple[int, ...]]()
        for group in groups:
            for around in {machine.coordinates[partition][:level] for partition in group}:
                nodes = {
                    machine.coordinates[partition][: level + 1]
                    for partition in group
                    if machine.coordinates[partition][:level] == around
                }
                children = max(children, len(nodes))
                sharing.update(nodes if len(nodes) > 1 else ())
        full = machine.topology.axes[level]
        assert axis.size == children
        parts = max(sharing.values(), default=1) if full.shared else 1
        assert axis.bandwidth == full.bandwidth / parts
        assert (axis.name, axis.latency_s) == (full.name, full.latency_s)


def test_groups_share_the_link_of_their_host_and_not_those_of_devices() -> None:
    host, device = FLAT.topology.axes
    columns = FLAT.links(((0, 4), (1, 5), (2, 6), (3, 7))).axes
    assert [axis.bandwidth for axis in columns] == [host.bandwidth / 4, device.bandwidth]
    halves = FLAT.links(((0, 2, 4, 6), (1, 3, 5, 7))).axes
    assert [(axis.size, axis.bandwidth) for axis in halves] == [
        (2, host.bandwidth / 2),
        (2, device.bandwidth),
    ]
    rows = FLAT.links(((0, 1, 2, 3), (4, 5, 6, 7))).axes
    assert [(axis.size, axis.bandwidth) for axis in rows] == [
        (1, host.bandwidth),
        (4, device.bandwidth),
    ]


def test_of_uneven_groups_the_largest_numbers_count() -> None:
    assert sizes_of(FLAT, ((0, 1, 2, 4),)) == [2, 3]
    assert sizes_of(FLAT, ((0, 1), (2, 6), (3,))) == [2, 2]


def test_three_levels_share_level_by_level() -> None:
    rack, host, device = RACKS.axes
    groups = tuple((number, number + 4) for number in (0, 1, 2, 3, 8, 9, 10, 11))
    links = DEEP.links(groups).axes
    assert [axis.size for axis in links] == [1, 2, 1]
    assert [axis.bandwidth for axis in links] == [
        rack.bandwidth,
        host.bandwidth / 4,
        device.bandwidth,
    ]
    far = DEEP.links(tuple((number, number + 8) for number in range(8))).axes
    assert [(axis.size, axis.bandwidth) for axis in far] == [
        (2, rack.bandwidth / 8), (1, host.bandwidth), (1, device.bandwidth)
    ]  # fmt: skip
