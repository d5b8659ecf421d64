"""Collectives: exact costs of small cases, and of any group of axes against an oracle."""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import TopologyError
from memplan.hardware.collectives import LAUNCH_S, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.topology import Axis, Topology, topology_named


def machine(*axes: Axis) -> Topology:
    return Topology("machine", "", axes, ())


def hosts(count: int, devices: int) -> Topology:
    """A network of 1 byte/s and 1 s a step, links of 4 bytes/s without latency inside."""
    return machine(Axis("host", count, 1.0, 1.0), Axis("device", devices, 0.0, 4.0, shared=False))


TWO_BY_FOUR = hosts(2, 4)
BOTH = ("host", "device")
Take = Callable[[Topology, tuple[str, ...], float], float]


def beyond_launch(take: Take, topology: Topology, axes: tuple[str, ...], nbytes: float) -> float:
    return take(topology, axes, nbytes) - LAUNCH_S


def test_seconds_by_hand() -> None:
    scatter = partial(beyond_launch, reduce_scatter_seconds)
    reduce = partial(beyond_launch, all_reduce_seconds)
    # 3/4 of 8 bytes at 4 bytes/s.
    assert scatter(TWO_BY_FOUR, ("device",), 8) == pytest.approx(1.5)
    # A step, and half of 2 bytes beside three others' at 1 byte/s.
    assert scatter(TWO_BY_FOUR, ("host",), 2) == pytest.approx(1 + 4)
    # A step between hosts and six inside, which take no time; 7/8 of 8 bytes.
    assert scatter(TWO_BY_FOUR, BOTH, 8) == pytest.approx(1 + 7)
    assert reduce(TWO_BY_FOUR, ("device",), 8) == pytest.approx(2 * 1.5)
    # Between two hosts trees take 2 steps, and all bytes once; along a ring 2 x 7/8 of them.
    assert reduce(TWO_BY_FOUR, BOTH, 8) == pytest.approx(2 + 8 / 0.92)
    # Three hosts: a ring of 2 x 2 steps between hosts with 2 x 11/12 of the bytes, or trees of
    # 2 x 2 steps with 2 x the bytes.
    assert reduce(hosts(3, 4), BOTH, 24) == pytest.approx(4 + 44)
    # Nine hosts: 16 steps around, 8 along trees.
    assert reduce(hosts(9, 4), BOTH, 0.92) == pytest.approx(8 + 2)


def test_a_card_of_ones_own_is_not_shared() -> None:
    own = machine(Axis("host", 2, 1.0, 1.0, shared=False), TWO_BY_FOUR.axes[1])
    assert beyond_launch(reduce_scatter_seconds, own, ("host",), 2) == pytest.approx(1 + 1)


def test_small_sums_take_what_nccl_was_measured_to_take() -> None:
    """21 to 24 us for 8 to 256 KB over eight H100."""
    host = topology_named("today").resized({"host": 1, "device": 8})
    for nbytes in (8_000, 64_000, 256_000):
        assert 21e-6 < all_reduce_seconds(host, BOTH, nbytes) < 24e-6


def test_axes_of_one_node_are_left_out() -> None:
    for take in (all_reduce_seconds, reduce_scatter_seconds):
        assert take(hosts(1, 1), BOTH, 8) == 0
        assert take(hosts(1, 4), BOTH, 8) == take(hosts(1, 4), ("device",), 8)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["ddl", "today"]), st.integers(1, 8), st.floats(0, 1e9))
def test_within_one_host_a_collective_over_all_axes_never_sees_the_network(
    name: str, devices: int, nbytes: float
) -> None:
    host = topology_named(name).resized({"host": 1, "device": devices})
    across = host.resized({"host": devices, "device": 1})
    for take in (all_reduce_seconds, reduce_scatter_seconds):
        assert take(host, BOTH, nbytes) <= take(across, BOTH, nbytes)
        assert take(host, BOTH, nbytes) == take(host, ("device",), nbytes)


def test_an_axis_of_another_machine_is_refused() -> None:
    with pytest.raises(TopologyError, match="no axis 'card'"):
        all_reduce_seconds(topology_named("ddl"), ("card",), 8)


def steps_around(topology: Topology, group: Sequence[str]) -> Fraction:
    """Seconds that a message takes from device to device around the ring, without its bytes."""
    names = list(topology.sizes)
    sizes = (range(size) if name in group else [0] for name, size in topology.sizes.items())
    ring = list(itertools.product(*sizes))
    total = Fraction(0)
    for device, following in itertools.pairwise(ring):
        crossed = next(name for name, a, b in zip(names, device, following, strict=True) if a != b)
        total += Fraction(topology.axis(crossed).latency_s)
    return total


def oracle_seconds(topology: Topology, names: Sequence[str], nbytes: int) -> tuple[float, float]:
    """Seconds of a reduce-scatter and of an all-reduce: exact fractions all the way."""
    axes = topology.axes
    group = [axis for axis in axes if axis.name in names and axis.size > 1]
    if not group:
        return 0.0, 0.0
    n = math.prod(axis.size for axis in group)
    tree = per_byte = per_tree_byte = Fraction(0)
    for axis in group:
        below = axes[axes.index(axis) + 1 :]
        in_node = math.prod(axis.size for axis in below)
        of_one_ring = math.prod(axis.size for axis in below if axis in group)
        link = (in_node // of_one_ring if axis.shared else 1) / Fraction(axis.bandwidth)
        tree += 2 * math.ceil(math.log2(axis.size)) * Fraction(axis.latency_s)
        per_byte = max(per_byte, link)
        ways = 1 if axis is group[0] and axis.size == 2 else 2
        per_tree_byte = max(per_tree_byte, ways * link / Fraction("0.92"))
    around = steps_around(topology, names) + Fraction(nbytes) * (n - 1) * per_byte / n
    reduce = min(2 * around, tree + nbytes * per_tree_byte)
    return float(Fraction(LAUNCH_S) + around), float(Fraction(LAUNCH_S) + reduce)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    latencies = st.one_of(st.just(0.0), st.floats(1e-7, 1e-4))
    figures = st.tuples(st.integers(1, 6), latencies, st.floats(1e8, 1e12), st.booleans())
    return machine(*(Axis(name, *draw(figures)) for name in "abcd"[: draw(st.integers(1, 4))]))


@settings(max_examples=60, deadline=None)
@given(machines(), st.integers(0, 10**9))
def test_every_group_of_axes_costs_what_the_oracle_says(topology: Topology, nbytes: int) -> None:
    names = list(topology.sizes)
    for count in range(1, len(names) + 1):
        for group in itertools.combinations(names, count):
            scatter_s, reduce_s = oracle_seconds(topology, group, nbytes)
            assert reduce_scatter_seconds(topology, group, nbytes) == pytest.approx(
                scatter_s, rel=1e-9
            )
            assert all_reduce_seconds(topology, group, nbytes) == pytest.approx(reduce_s, rel=1e-9)
