"""Choices of what is written: the best of those that were tried, refined to no worse, inside the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.graph import ALIGNED
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import Slabs, Walls
from tests.planning.slab_graphs import HALO, SOLVABLE, Made, Written, norm, slab_graphs, written

ROOMY = SlabLimits(10**6, 10**6, 0)


def choice(one: Written, limits: SlabLimits, rows: int = 2) -> Choice:
    return Choice(Pricer(Walls(one.graph, one.slabs(rows).ops), SOLVABLE), one.slabs(rows), limits)


def written_by(one: Written, slabs: Slabs) -> set[int]:
    return {value for loop in Walls(one.graph, slabs.ops).loops(slabs) for value in loop.writes}


@given(slab_graphs(), st.integers(50, 400), st.integers(0, 200))
@settings(max_examples=25)
def test_a_choice_is_what_it_says_and_refined_no_worse(one: Written, device: int, host: int) -> None:
    if not one.graph.along:
        return
    limits = SlabLimits(device, host, 10)
    found = choice(one, limits)
    best = found.best()
    refined = found.refined(best[0])
    for slabs, price in (best, refined):
        assert replace(slabs, stored=frozenset(), on_host=frozenset(), recomputed_in=frozenset()) == one.slabs(2)
        assert slabs.on_host <= written_by(one, slabs)
        assert not slabs.on_host & found.pricer.read_whole.keys()
        assert price == price_of(one, slabs, limits)
    assert order(limits, refined[1]) <= order(limits, best[1])
    assert found.refined(refined[0])[1] == refined[1]


def price_of(one: Written, slabs: Slabs, limits: SlabLimits) -> Price:
    return Pricer(Walls(one.graph, slabs.ops), SOLVABLE).price(slabs, limits)


def order(limits: SlabLimits, price: Price) -> tuple[int, float]:
    return limits.excess(price), price.seconds


@given(slab_graphs(most=6))
@settings(max_examples=40)
def test_refined_no_value_written_or_not_makes_it_faster_by_itself(one: Written) -> None:
    """With room for everything, so that all is on the device."""
    if not one.graph.along:
        return
    slabs, price = choice(one, ROOMY).refined(choice(one, ROOMY).best()[0])
    made = [v for op in one.graph.along for v in one.graph.graph.ops[op].outputs if not one.graph.along[op].reduces]
    assert not slabs.on_host
    for value in made:
        other = replace(slabs, stored=slabs.stored ^ {value})
        assert price_of(one, other, ROOMY).seconds >= price.seconds - 1e-9


@pytest.mark.parametrize(
    ("device", "stored", "on_host", "seconds"),
    [
        (104, {"a"}, set(), 42.0),  # 40 bytes; 40 of its second copy, laid out anew, or 64 of the first loop's trip
        (103, set(), set(), 82.0),
    ],
)
def test_refined_what_was_to_be_made_again_is_kept_where_there_is_room(
    device: int, stored: set[str], on_host: set[str], seconds: float
) -> None:
    """Making `a` again takes 40 s, as long as one of its two copies to the host and back, of which one is hidden."""
    one, limits = norm(nbytes=40), SlabLimits(device, 100, 0)
    assert choice(one, limits).best()[0] == one.slabs(2)
    slabs, price = choice(one, limits).refined(one.slabs(2))
    assert (one.named(slabs.stored), one.named(slabs.on_host)) == (stored, on_host)
    assert price.seconds == pytest.approx(seconds, abs=1e-3)


def test_a_value_is_written_for_the_first_that_read_it_where_the_last_has_no_room() -> None:
    """`a` is read by two loops; the second one's `wide` leaves no room for it, which it makes again."""
    one = written(
        {"x": 8},
        {
            "a": Made({"x": ALIGNED}, nbytes=40, seconds=40),
            "sum": Made({"a": ALIGNED}, reduces=True, fusion="reduction"),
            "b": Made({"a": ALIGNED}, ["sum"]),
            "more": Made({"b": ALIGNED}, reduces=True, fusion="reduction"),
            "wide": Made({"a": ALIGNED}, ["more"], nbytes=80),
        },
        ["wide"],
    )
    a = one.values["a"]
    found = choice(one, SlabLimits(10**6, 0, 0))
    (kept, roomy), tight = found.refined(one.slabs(2)), found.refined(one.slabs(2))[1].device_bytes - 1
    slabs, price = choice(one, SlabLimits(tight, 0, 0)).refined(one.slabs(2))
    assert (kept.stored, kept.recomputed_in) == ({a}, set())
    assert (slabs.stored, slabs.recomputed_in) == ({a}, {(a, 2)})
    assert price.device_bytes <= tight and price.seconds == pytest.approx(roomy.seconds + 40, abs=1e-3)


def test_without_room_on_the_device_what_is_written_lies_on_the_host() -> None:
    one = norm(nbytes=10)
    slabs, price = choice(one, SlabLimits(41, 100, 0)).best()
    assert one.named(slabs.stored) == one.named(slabs.on_host) == {"a"}
    assert price.host_bytes == 10 + 2 * 10 * slabs.rows // 8 and price.device_bytes <= 41
    assert not choice(one, SlabLimits(42, 100, 0)).best()[0].on_host


def test_what_is_dear_is_made_again_where_there_is_no_room_for_it_anywhere() -> None:
    one = norm(nbytes=40, seconds=1000.0)
    enough = 40 + 2 * 10  # with spare rows for two slabs of two of its eight rows
    assert one.named(choice(one, SlabLimits(64, enough, 0)).best()[0].stored) == {"a"}
    slabs, price = choice(one, SlabLimits(64, 0, 0)).best()
    assert not slabs.stored
    assert price.device_bytes <= 64 and price.seconds > 2000


def test_what_takes_the_least_is_told_where_nothing_fits() -> None:
    one, limits = norm(nbytes=40), SlabLimits(10, 0, 0)
    _, price = choice(one, limits).best()
    assert limits.excess(price) > 0 and price.host_bytes == 0


def test_what_is_made_again_by_too_many_rows_is_written_however_long_its_copies_take() -> None:
    """Behind each sum a convolution of the last one's: with nothing written the last loop makes the rows around."""
    ops, source, whole = dict[str, Made](), "x", list[str]()
    for name in "abcdef":
        ops[name] = Made({source: HALO}, whole, rows=24, nbytes=240)
        ops[f"sum {name}"] = Made({name: ALIGNED}, reduces=True, nbytes=1, fusion="reduction")
        source, whole = name, [f"sum {name}"]
    one = written({"x": 24}, ops, whole)
    bare, limits = one.slabs(2), SlabLimits(0, 10**6, 0)
    least = price_of(one, bare, limits).device_bytes
    roomy, tight = (choice(one, replace(limits, device_bytes=room)).best() for room in (least, least - 1))
    assert not roomy[0].stored
    assert tight[0].stored and tight[1].device_bytes < least
    assert tight[1].seconds > roomy[1].seconds + 240
