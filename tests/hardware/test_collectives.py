"""Collectives: exact costs of small cases, bytes counted along real rings, and the cheapest against all there are."""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import TopologyError
from memplan.hardware import collectives
from memplan.hardware.collectives import Phase
from memplan.hardware.topology import Axis, Topology, topology_named


def machine(*axes: Axis) -> Topology:
    return Topology("machine", "", axes, ())


def hosts(count: int, devices: int) -> Topology:
    """A network of 1 byte/s and 1 s a step, links of 4 bytes/s without latency inside."""
    return machine(Axis("host", count, 1.0, 1.0), Axis("device", devices, 0.0, 4.0, shared=False))


TWO_BY_FOUR = hosts(2, 4)
Phases = tuple[Phase, ...]
LEVELS = Phase(("device",), True), Phase(("host",), False)
FLAT = (Phase(("host", "device"), False),)
APART = Phase(("host",), False), Phase(("device",), False)


def seconds(topology: Topology, phases: Phases, nbytes: float, launch_s: float = 0.0) -> float:
    total = 0.0
    for phase in phases:
        if phase.scatters:
            total += 2 * collectives.reduce_scatter_seconds(
                topology, phase.axes, nbytes, launch_s=launch_s
            )
            nbytes /= math.prod(topology.axis(name).size for name in phase.axes)
        else:
            total += collectives.all_reduce_seconds(topology, phase.axes, nbytes, launch_s=launch_s)
    return total


def test_seconds_by_hand() -> None:
    # Twice 3/4 of 8 bytes at 4 bytes/s; 2 steps, and 2 bytes beside three others' at 1 byte/s.
    assert seconds(TWO_BY_FOUR, LEVELS, 8) == 2 * 1.5 + 2 * 1 + 8
    # Trees: 2 steps between hosts, none that take time inside; 2 x 7/8 of 8 bytes.
    assert seconds(TWO_BY_FOUR, FLAT, 8) == 2 + 14
    assert seconds(TWO_BY_FOUR, APART, 8) == (2 + 4 * 8) + 2 * 1.5
    assert seconds(TWO_BY_FOUR, LEVELS, 8, launch_s=10) == seconds(TWO_BY_FOUR, LEVELS, 8) + 30


def test_a_card_of_ones_own_is_not_shared() -> None:
    own = machine(Axis("host", 2, 1.0, 1.0, shared=False), TWO_BY_FOUR.axes[1])
    assert seconds(own, LEVELS, 8) == 2 * 1.5 + 2 * 1 + 2


def test_the_way_down_alone() -> None:
    assert collectives.reduce_scatter_seconds(TWO_BY_FOUR, ("device",), 8, launch_s=10) == 10 + 1.5
    assert collectives.reduce_scatter_seconds(TWO_BY_FOUR, ("host",), 2, launch_s=10) == 10 + 1 + 4


def test_small_sums_take_what_nccl_was_measured_to_take() -> None:
    """21 to 24 us for 8 to 256 KB over eight H100."""
    host = topology_named("today").resized({"host": 1, "device": 8})
    for nbytes in (8_000, 64_000, 256_000):
        taken_s = collectives.all_reduce_seconds(host, ("host", "device"), nbytes)
        assert 21e-6 < taken_s < 24e-6


def test_a_launch_is_assumed() -> None:
    launched = collectives.all_reduce_seconds(TWO_BY_FOUR, ("device",), 8)
    assert launched == pytest.approx(seconds(TWO_BY_FOUR, APART[1:], 8) + collectives.LAUNCH_S)


def test_axes_of_one_node_are_left_out() -> None:
    alone = hosts(1, 1)
    assert collectives.cheapest(alone, 8) == ()
    assert seconds(alone, LEVELS, 8, launch_s=10) == 0
    assert collectives.cheapest(hosts(1, 4), 8) == (Phase(("device",), False),)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["ddl", "today"]),
    st.integers(1, 8),
    st.floats(0, 1e9),
    st.sampled_from([0.0, 1e-5]),
)
def test_within_one_host_a_collective_over_all_axes_never_sees_the_network(
    name: str, devices: int, nbytes: float, launch_s: float
) -> None:
    host = topology_named(name).resized({"host": 1, "device": devices})
    link = host.axis("device")
    steps = 2 * math.ceil(math.log2(devices))  # along a tree; around a ring of two as many
    by_hand = (
        launch_s + steps * link.latency_s + 2 * (devices - 1) / devices * nbytes / link.bandwidth
    )
    assert seconds(host, FLAT, nbytes, launch_s) == pytest.approx(by_hand if devices > 1 else 0.0)
    across = host.resized({"host": devices, "device": 1})
    for take in (collectives.all_reduce_seconds, collectives.reduce_scatter_seconds):
        assert take(host, ("host", "device"), nbytes) <= take(across, ("host", "device"), nbytes)
        assert take(host, ("host", "device"), nbytes) == take(host, ("device",), nbytes)


def test_an_axis_of_another_machine_is_refused() -> None:
    with pytest.raises(TopologyError, match="no axis 'card'"):
        collectives.all_reduce_seconds(topology_named("ddl"), ("card",), 8)


def test_of_equals_the_fewest_collectives_are_taken() -> None:
    free = machine(*(Axis(name, 4, 0.0, 1e9, shared=False) for name in "abc"))
    assert collectives.cheapest(free, 0) == (Phase(("a", "b", "c"), False),)


def test_a_slow_shared_link_is_passed_with_pieces() -> None:
    shape = machine(Axis("host", 8, 1e-6, 1e9), Axis("device", 8, 1e-6, 2e9, shared=False))
    small, large = (collectives.cheapest(shape, nbytes) for nbytes in (10, 10**9))
    assert not any(phase.scatters for phase in small)
    assert counted(shape, large, 1)["host"] <= counted(shape, FLAT, 1)["host"]


# The oracle: axes get the number of their phase, a phase a digit; exact fractions all the way.
def all_phases(names: Sequence[str]) -> Iterator[tuple[Phase, ...]]:
    for phase_numbers in itertools.product(range(len(names)), repeat=len(names)):
        count = max(phase_numbers, default=-1) + 1
        if set(phase_numbers) != set(range(count)):
            continue
        groups: list[tuple[str, ...]] = [()] * count
        for name, number in zip(names, phase_numbers, strict=True):
            groups[number] += (name,)
        for digits in range(1 << max(0, count - 1)):
            yield tuple(Phase(group, bool(digits >> n & 1)) for n, group in enumerate(groups))


def oracle_seconds(
    topology: Topology, phases: Sequence[Phase], nbytes: int, launch_s: float
) -> Fraction:
    axes = topology.axes
    piece = Fraction(nbytes)
    total = Fraction(0)
    for phase in phases:
        group = [axis for axis in axes if axis.name in phase.axes]
        n = math.prod(axis.size for axis in group)
        latency = max(Fraction(axis.latency_s) for axis in group)
        per_byte = Fraction(0)
        for axis in group:
            below = axes[axes.index(axis) + 1 :]
            in_node = math.prod(axis.size for axis in below)
            of_one_ring = math.prod(axis.size for axis in below if axis in group)
            rings = in_node // of_one_ring if axis.shared else 1
            per_byte = max(per_byte, rings / Fraction(axis.bandwidth))
        wire = 2 * piece * (n - 1) * per_byte / n  # there and back
        if phase.scatters:
            total += 2 * Fraction(launch_s) + 2 * (n - 1) * latency + wire
            piece /= n
        else:
            trees = (2 * math.ceil(math.log2(a.size)) * Fraction(a.latency_s) for a in group)
            total += Fraction(launch_s) + sum(trees, Fraction(0)) + wire
    return total


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    latencies = st.one_of(st.just(0.0), st.floats(1e-7, 1e-4))
    figures = st.tuples(st.integers(1, 16), latencies, st.floats(1e8, 1e12), st.booleans())
    return machine(*(Axis(name, *draw(figures)) for name in "abcd"[: draw(st.integers(1, 4))]))


@settings(max_examples=120, deadline=None)
@given(machines(), st.sampled_from([0, 1, 10**3, 10**5, 10**7, 10**9]))
def test_the_cheapest_is_the_cheapest_of_all(topology: Topology, nbytes: int) -> None:
    launch_s = collectives.LAUNCH_S
    names = [axis.name for axis in topology.axes if axis.size > 1]
    costs = [oracle_seconds(topology, phases, nbytes, launch_s) for phases in all_phases(names)]
    phases = collectives.cheapest(topology, nbytes)
    phases_s = seconds(topology, phases, nbytes, launch_s)
    assert phases_s == pytest.approx(float(min(costs)), rel=1e-9)
    assert sorted(name for phase in phases for name in phase.axes) == sorted(names)
    assert phases == collectives.cheapest(topology, nbytes)


@settings(max_examples=40, deadline=None)
@given(machines(), st.integers(0, 10**9))
def test_every_decomposition_costs_what_the_oracle_says(topology: Topology, nbytes: int) -> None:
    for phases in all_phases([axis.name for axis in topology.axes if axis.size > 1]):
        phases_s = seconds(topology, phases, nbytes, 1e-5)
        oracle_s = float(oracle_seconds(topology, phases, nbytes, 1e-5))
        assert phases_s == pytest.approx(oracle_s, rel=1e-9)


def counted(topology: Topology, phases: Phases, nbytes: float) -> dict[str, float]:
    """Each device sends to the next of its ring; what leaves the first node of each axis is added up."""
    names = list(topology.sizes)
    devices = list(itertools.product(*(range(size) for size in topology.sizes.values())))
    sent = dict.fromkeys(names, 0.0)
    for phase in phases:
        inside = [names.index(name) for name in phase.axes]
        rings: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for device in devices:
            rings.setdefault(
                tuple(0 if at in inside else place for at, place in enumerate(device)), []
            ).append(device)
        for ring in rings.values():
            for device, following in zip(ring, ring[1:] + ring[:1], strict=True):
                for at in inside:
                    if not any(device[: at + 1]) and following[: at + 1] != device[: at + 1]:
                        sent[names[at]] += 2 * (len(ring) - 1) / len(ring) * nbytes
        if phase.scatters:
            nbytes /= len(next(iter(rings.values())))
    return sent
