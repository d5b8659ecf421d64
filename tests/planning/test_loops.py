"""The minimum cut against all choices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import Graph, Op, Value, op_seconds
from memplan.planning.loops import (
    PRICES,
    Loop,
    Option,
    Residuals,
    can_segment,
    cheapest,
    extra_seconds,
    host_nbytes,
    minimum_cut,
    options,
    recomputed_nbytes,
    recomputed_ops,
    stacked_nbytes,
    total_nbytes,
)

DEVICE = catalog.named("v100")
MIB = 1 << 20


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """A carry, a slice and up to five operations."""
    values = [Value("carry", draw(st.integers(1, 64)) * MIB), Value("slice", MIB)]
    ops = []
    for number in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
        fusion = draw(st.sampled_from(["kernel", "elementwise", "reduction"]))
        recomputable = draw(st.integers(0, 5)) > 0
        ops.append(
            Op(f"op{number}", tuple(inputs), (len(values),), flops=draw(st.integers(0, 40)) * 1e9, fusion=fusion,
               recomputable=recomputable)
        )  # fmt: skip
        values.append(Value(f"value{number}", draw(st.integers(1, 64)) * MIB))
    results = range(2, len(values))
    needed = draw(st.sets(st.sampled_from(results), min_size=1))
    body = Graph(tuple(values), tuple(ops))
    trips = draw(st.integers(1, 9))
    runs = draw(st.integers(1, 3))
    available = frozenset({1})
    reverses = draw(st.booleans())
    return Loop(body, trips, runs, available, frozenset(needed), (0,), reverses)


def is_complete(loop: Loop, stacked: frozenset[int]) -> bool:
    """Can all that is needed be computed from what is stacked?"""
    again = [loop.body.ops[op] for op in recomputed_ops(loop, Residuals(tuple(stacked)))]
    available = loop.available.union(stacked, *(op.outputs for op in again))
    may_run = all(op.recomputable and available.issuperset(op.inputs) for op in again)
    return loop.needed <= available and may_run


def cost(loop: Loop, stacked: frozenset[int], price: float, moves: bool, device: Device) -> float:
    times = loop.trips * loop.runs
    total = 0.0
    for value in stacked:
        nbytes = loop.trips * loop.body.nbytes(value)
        kept = nbytes * (price + 2 * loop.runs / device.achieved_bandwidth)
        moved = 2 * times * copy_seconds(loop.body.nbytes(value), device)
        total += min(kept, moved) if moves else kept
    for number in recomputed_ops(loop, Residuals(tuple(stacked))):
        op = loop.body.ops[number]
        total += times * op_seconds(loop.body, op, device) if op.fusion != "elementwise" else 0.0
    return total


@settings(max_examples=100, deadline=None)
@given(loops(), st.sampled_from(PRICES), st.booleans())
def test_no_other_choice_is_cheaper(loop: Loop, price: float, moves: bool) -> None:
    choice = cheapest(loop, price, DEVICE, moves)
    assert is_complete(loop, frozenset(choice.stacked))
    candidates = set(range(len(loop.body.values))) - loop.available
    counts = range(len(candidates) + 1)
    subsets = (frozenset(subset) for count in counts for subset in combinations(candidates, count))
    complete = (subset for subset in subsets if is_complete(loop, subset))
    best = min(cost(loop, subset, price, moves, DEVICE) for subset in complete)
    everything = cost(loop, frozenset(candidates), price, moves, DEVICE)
    chosen_cost = cost(loop, frozenset(choice.stacked), price, moves, DEVICE)
    assert chosen_cost <= best + 1e-6 * everything  # whole ticks


@settings(max_examples=40)
@given(loops(), st.booleans())
def test_a_higher_price_never_stacks_more(loop: Loop, moves: bool) -> None:
    nbytes = [stacked_nbytes(loop, cheapest(loop, price, DEVICE, moves)) for price in PRICES]
    assert nbytes == sorted(nbytes, reverse=True)


def chain() -> Loop:
    """carry -> product -> product; the backward body reads both products."""
    values = (Value("carry", MIB), Value("first", 64 * MIB), Value("second", 64 * MIB))
    product = {"flops": 1e12, "flops_dtype": "float32"}
    ops = (Op("dot_general", (0,), (1,), **product), Op("dot_general", (1,), (2,), **product))
    return Loop(Graph(values, ops), 10, 1, frozenset(), frozenset({1, 2}))


def test_prices_decide_between_stacks_and_repetition() -> None:
    assert cheapest(chain(), PRICES[0], DEVICE).kept == (1, 2)
    small = cheapest(chain(), PRICES[-1], DEVICE)
    assert small.kept == (0,)
    assert recomputed_ops(chain(), small) == (0, 1)
    assert stacked_nbytes(chain(), small) == 10 * MIB
    assert stacked_nbytes(chain(), None) == 10 * 128 * MIB


def test_the_host_takes_what_is_dear_to_repeat() -> None:
    moved = cheapest(chain(), PRICES[-1], DEVICE, offload=True)
    assert moved == Residuals((), (1, 2))


@pytest.mark.parametrize("price", PRICES[::6])
def test_what_may_run_once_is_stacked(price: float) -> None:
    values = (Value("carry", MIB), Value("drawn", 64 * MIB))
    op = Op("rng_uniform", (0,), (1,), recomputable=False)
    loop = Loop(Graph(values, (op,)), 10, 1, frozenset(), frozenset({1}))
    assert cheapest(loop, price, DEVICE).kept == (1,)


@settings(max_examples=8, deadline=None)
@given(loops(), st.sampled_from([0, 64 * MIB, 1 << 40]))
def test_no_segments_are_smaller_and_faster_than_the_options(loop: Loop, host_bytes: int) -> None:
    frontier = options(loop, DEVICE, host_bytes)
    assert frontier == sorted(frontier, key=lambda option: option.seconds)
    assert all(host_nbytes(loop, option.residuals) <= host_bytes for option in frontier)
    segments = list(product(range(2, loop.trips + 1), range(1, loop.trips // 2 + 1), (False, True)))
    for price, (count, length, on_host) in product(PRICES[::8], segments):
        segmented = replace(
            cheapest(loop, price, DEVICE),
            segments=count,
            segment_trips=length,
            snapshots_on_host=(on_host,),
        )
        fits = host_nbytes(loop, segmented) <= host_bytes and not on_host
        if can_segment(loop, segmented) and fits:
            nbytes = stacked_nbytes(loop, segmented) + recomputed_nbytes(loop, segmented)
            seconds = extra_seconds(loop, segmented, DEVICE)
            assert any(
                option.total_nbytes <= nbytes and option.seconds <= seconds for option in frontier
            )


def test_segments_take_the_bytes_of_few_trips_for_one_more_run() -> None:
    """100 trips: in 10 segments, 10 snapshots of 1 MiB and 10 trips of 2 x 64 MiB."""
    loop = replace(chain(), trips=100, carried=(0,), reverses=True)
    kept = Residuals((1, 2))
    segmented = replace(kept, segments=10, segment_trips=10, snapshots_on_host=(False,))
    assert stacked_nbytes(loop, segmented) == 10 * MIB + 10 * 128 * MIB
    products = 100 * 2 * op_seconds(loop.body, loop.body.ops[0], DEVICE)
    assert extra_seconds(loop, kept, DEVICE) == 0
    assert products < extra_seconds(loop, segmented, DEVICE) < 1.01 * products
    moved = replace(segmented, snapshots_on_host=(True,))
    assert (
        stacked_nbytes(loop, moved) == 2 * MIB + 10 * 128 * MIB
        and host_nbytes(loop, moved) == 10 * MIB
    )
    # Behind seven segments, thirty trips stay.
    fewer = replace(segmented, segments=7)
    assert stacked_nbytes(loop, fewer) == 7 * MIB + 30 * 128 * MIB


def test_what_is_computed_again_at_once_takes_bytes() -> None:
    """Both products, unless the first is kept: then the second alone."""
    loop = replace(chain(), available=frozenset({0}))
    assert recomputed_nbytes(loop, Residuals((1, 2))) == 0
    assert recomputed_nbytes(loop, Residuals((1,))) == 64 * MIB
    assert recomputed_nbytes(loop, Residuals(())) == 128 * MIB


def test_branches_of_a_conditional_share_their_bytes() -> None:
    def inside(*branches: tuple[int, int]) -> Loop:
        return replace(chain(), branches=tuple(((place,), branch) for place, branch in branches))

    loops = [inside(), inside((3, 0)), inside((3, 1)), inside((3, 1)), inside((3, 1), (5, 0))]
    sizes = (1, 20, 4, 5, 6)
    chosen = [Option(Residuals(()), size, 0.0, recomputed_nbytes=2) for size in sizes]
    assert total_nbytes(loops, chosen) == 1 + max(20, 4 + 5 + 6) + 2
    assert total_nbytes([*loops, inside((4, 0))], [*chosen, chosen[0]]) == 1 + 20 + 1 + 2


def test_what_may_run_once_is_in_no_segment() -> None:
    loop = replace(chain(), carried=(0,), reverses=True)
    segments = Residuals((1, 2), segments=2, segment_trips=5, snapshots_on_host=(False,))
    assert can_segment(loop, segments)
    drawn = replace(
        loop.body, ops=(replace(loop.body.ops[0], recomputable=False), loop.body.ops[1])
    )
    assert not can_segment(replace(loop, body=drawn), segments)
    assert not can_segment(replace(loop, reverses=False), segments)
    for wrong in (
        {"segments": 3},
        {"segment_trips": 0},
        {"snapshots_on_host": ()},
        {"on_host": (1,)},
    ):
        assert not can_segment(loop, replace(segments, **wrong))


SIZE, SOURCE, SINK = 7, 5, 6
NODES = st.integers(0, SIZE - 3)
COSTS = st.lists(
    st.tuples(NODES, NODES | st.just(SINK), st.integers(0, 9).map(float)), min_size=1, max_size=9
)
BONDS = st.lists(st.tuples(NODES | st.just(SOURCE), NODES), min_size=1, max_size=6)


def paid(side: Sequence[bool], costs: Sequence[tuple[int, int, float]]) -> float:
    return sum(seconds for start, end, seconds in costs if side[start] and not side[end])


def sides(bonds: Sequence[tuple[int, int]]) -> Any:
    for flags in product([False, True], repeat=SIZE - 2):
        side = [*flags, True, False]
        if all(side[end] or not side[start] for start, end in bonds):
            yield side


@given(COSTS, BONDS, st.sampled_from([1.0, 1e-6, 1e6]))
def test_no_set_that_keeps_the_bonds_costs_less(costs: Any, bonds: Any, unit: float) -> None:
    costs = [(start, end, seconds * unit) for start, end, seconds in costs]
    in_source = minimum_cut(SIZE, SOURCE, SINK, costs, bonds).tolist()
    assert in_source in list(sides(bonds))
    cheapest_s = min(paid(side, costs) for side in sides(bonds))
    assert paid(in_source, costs) == pytest.approx(cheapest_s, rel=1e-6)


def test_bonds_hold_however_often_they_are_given() -> None:
    """They were added up, beyond what an int32 holds, and held no more."""
    for times in (1, 2, 3):
        bonds = [(0, 1)] * times + [(1, 2)] * times
        in_source = minimum_cut(4, 0, 3, [(1, 2, 9.0), (2, 3, 1.0)], bonds)
        assert in_source.tolist() == [True, True, True, False]


def test_a_stack_or_a_snapshot_on_the_host_uses_the_host() -> None:
    on_device = Residuals(kept=(0,), segments=2, segment_trips=1, snapshots_on_host=(False,))
    assert not on_device.uses_host
    assert replace(on_device, on_host=(1,)).uses_host
    assert replace(on_device, snapshots_on_host=(False, True)).uses_host
