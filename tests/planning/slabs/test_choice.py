"""Choices of stored values: their prices, their refinement, and the limits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan.planning.slabs.choice
from memplan.planning.graph import ALIGNED
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.cut import SlabCuts
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import Slabs, Walls, slab_rows
from tests.planning.slab_graphs import (
    HALO,
    SOLVABLE,
    NamedGraph,
    NamedOp,
    named_graph,
    norm,
    slab_graphs,
)
from tests.planning.unit import UNIT

ROOMY = SlabLimits(10**6, 10**6, 0)


def choice(program: NamedGraph, limits: SlabLimits, rows: int = 2) -> Choice:
    slabs = program.slabs(rows)
    return Choice(SlabCuts(Pricer(Walls(program.graph, slabs.ops), SOLVABLE)), slabs, limits)


def written_by(program: NamedGraph, slabs: Slabs) -> set[int]:
    return {value for loop in Walls(program.graph, slabs.ops).loops(slabs) for value in loop.writes}


@given(slab_graphs(), st.integers(50, 400), st.integers(0, 200))
@settings(max_examples=25)
def test_a_choice_is_what_it_says_and_refined_no_worse(
    program: Any, device: int, host: int
) -> None:
    if not program.graph.along:
        return
    limits = SlabLimits(device, host, 10)
    choices = choice(program, limits)
    best = choices.best()
    refined = choices.refined(best[0])
    for slabs, price in (best, refined):
        empty = frozenset()
        bare = replace(slabs, stored=empty, on_host=empty, recomputed_in=empty, on_device=empty)
        assert bare == program.slabs(2)
        assert slabs.on_host <= written_by(program, slabs)
        assert slabs.device_rows.keys() <= slabs.on_host
        for value, rows in slabs.on_device:
            assert 0 < rows < slab_rows(program.graph, slabs, value)
        assert not slabs.on_host & choices.pricer.lifetimes.read_whole.keys()
        assert price == price_of(program, slabs, limits)
    assert order(limits, refined[1]) <= order(limits, best[1])
    assert choices.refined(refined[0])[1] == refined[1]


def test_a_loop_that_adds_up_a_large_sum_takes_many_slabs_in_a_trip() -> None:
    """As many as fit beside it."""
    program = named_graph(
        {"x": 128},
        {
            "a": NamedOp({"x": ALIGNED}, rows=128, nbytes=128, shape=(128,)),
            "sum": NamedOp({"a": ALIGNED}, rows=128, reduces=True, nbytes=1000, shape=(250,)),
            "b": NamedOp({"x": ALIGNED}, ["sum"], rows=128, nbytes=128),
        },
        ["b"],
    )
    narrow = program.slabs(2)
    least = price_of(program, narrow, ROOMY).device_bytes
    for device, count in ((10**6, 64), (least + 30, 8)):
        limits = SlabLimits(device, 0, 0)
        unit = Choice(SlabCuts(Pricer(Walls(program.graph, narrow.ops), UNIT)), narrow, limits)
        slabs, price = unit.widened(narrow)
        assert limits.fits(price) and slabs.slabs_at_once[0] == count
    with pytest.MonkeyPatch.context() as patched:  # fewer than 33 of the 128 rows
        patched.setattr(memplan.planning.slabs.choice, "MOST_ELEMENTS", 33)
        assert choice(program, ROOMY).widened(narrow)[0].slabs_at_once[0] == 16


def price_of(program: NamedGraph, slabs: Slabs, limits: SlabLimits) -> Price:
    return Pricer(Walls(program.graph, slabs.ops), SOLVABLE).price(slabs, limits)


def order(limits: SlabLimits, price: Price) -> tuple[int, float]:
    return limits.excess(price), price.seconds


@given(slab_graphs(max_ops=6))
@settings(max_examples=40)
def test_refined_no_value_written_or_not_makes_it_faster_by_itself(program: NamedGraph) -> None:
    """With room for everything, so that all is on the device."""
    if not program.graph.along:
        return
    slabs, price = choice(program, ROOMY).refined(choice(program, ROOMY).best()[0])
    ops, along = program.graph.graph.ops, program.graph.along
    values = [value for op in along for value in ops[op].outputs if not along[op].reduces]
    assert not slabs.on_host
    for value in values:
        toggled = replace(slabs, stored=slabs.stored ^ {value})
        assert price_of(program, toggled, ROOMY).seconds >= price.seconds - 1e-9


@pytest.mark.parametrize(
    ("device", "stored", "on_host", "seconds"),
    [
        # 40 bytes; 40 of its second copy, laid out anew, or 64 of the first loop's trip; 4 of the mean
        (108, {"a"}, set(), 42.0),
        # half of it fits, and the other half is copied beside the kernels of the first loop
        (107, {"a"}, {"a"}, 41.0 + 20.0 + 2 * 20 / 4),
    ],
)
def test_refined_what_was_to_be_made_again_is_kept_where_there_is_room(
    device: int, stored: set[str], on_host: set[str], seconds: float
) -> None:
    """Making `a` again takes 40 s, as long as one of its two copies to the host and back, of which one is hidden."""
    program = norm(nbytes=40)
    limits = SlabLimits(device, 100, 0)
    assert choice(program, limits).best()[0] == program.slabs(2)
    slabs, price = choice(program, limits).refined(program.slabs(2))
    assert (program.named(slabs.stored), program.named(slabs.on_host)) == (stored, on_host)
    assert price.seconds == pytest.approx(seconds, abs=1e-3)


def test_a_value_is_written_for_the_first_that_read_it_where_the_last_has_no_room() -> None:
    """`a` is read by two loops; the second one's `wide` leaves no room for it, which it makes again."""
    program = named_graph(
        {"x": 8},
        {
            "a": NamedOp({"x": ALIGNED}, nbytes=40, seconds=40),
            "sum": NamedOp({"a": ALIGNED}, reduces=True, fusion="reduction"),
            "b": NamedOp({"a": ALIGNED}, ["sum"]),
            "more": NamedOp({"b": ALIGNED}, reduces=True, fusion="reduction"),
            "wide": NamedOp({"a": ALIGNED}, ["more"], nbytes=80),
        },
        ["wide"],
    )
    a = program.values["a"]
    kept, roomy = choice(program, SlabLimits(10**6, 0, 0)).refined(program.slabs(2))
    tight = roomy.device_bytes - 1
    slabs, price = choice(program, SlabLimits(tight, 0, 0)).refined(program.slabs(2))
    assert (kept.stored, kept.recomputed_in) == ({a}, set())
    assert (slabs.stored, slabs.recomputed_in) == ({a}, {(a, 2)})
    assert price.device_bytes <= tight and price.seconds == pytest.approx(
        roomy.seconds + 40, abs=1e-3
    )


def test_without_room_on_the_device_what_is_written_lies_on_the_host() -> None:
    program = norm(nbytes=10)
    slabs, price = choice(program, SlabLimits(45, 100, 0)).best()
    assert program.named(slabs.stored) == program.named(slabs.on_host) == {"a"}
    # a row of two fits in each slab, and the other is on the host, with a spare slab at each end
    assert program.named(slabs.device_rows) == {"a"} and set(slabs.device_rows.values()) == {1}
    assert price.host_bytes == (8 // 2 + 2) * 10 // 8 and price.device_bytes <= 45
    assert not choice(program, SlabLimits(46, 100, 0)).best()[0].on_host


def test_what_is_dear_is_made_again_where_there_is_no_room_for_it_anywhere() -> None:
    program = norm(nbytes=40, seconds=1000.0)
    enough = 40 + 2 * 10  # with spare rows for two slabs of two of its eight rows
    assert program.named(choice(program, SlabLimits(68, enough, 0)).best()[0].stored) == {"a"}
    slabs, price = choice(program, SlabLimits(68, 0, 0)).best()
    assert not slabs.stored
    assert price.device_bytes <= 68 and price.seconds > 2000


def test_what_takes_the_least_is_told_where_nothing_fits() -> None:
    program = norm(nbytes=40)
    limits = SlabLimits(10, 0, 0)
    _, price = choice(program, limits).best()
    assert limits.excess(price) > 0 and price.host_bytes == 0


def test_what_is_made_again_by_too_many_rows_is_written_however_long_its_copies_take() -> None:
    """Behind each sum a convolution of the last one's: with nothing written the last loop makes the rows around."""
    ops = dict[str, NamedOp]()
    source = "x"
    whole = list[str]()
    for name in "abcdef":
        ops[name] = NamedOp({source: HALO}, whole, rows=24, nbytes=240)
        ops[f"sum {name}"] = NamedOp({name: ALIGNED}, reduces=True, nbytes=1, fusion="reduction")
        source = name
        whole = [f"sum {name}"]
    program = named_graph({"x": 24}, ops, whole)
    bare = program.slabs(2)
    limits = SlabLimits(0, 10**6, 0)
    bare_bytes = price_of(program, bare, limits).device_bytes
    sizes = bare_bytes, bare_bytes - 1
    roomy, tight = (choice(program, replace(limits, device_bytes=size)).best() for size in sizes)
    assert not roomy[0].stored
    assert tight[0].stored and tight[1].device_bytes < bare_bytes
    assert tight[1].seconds > roomy[1].seconds + 240
