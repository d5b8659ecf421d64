"""Prices, added up by hand on a device where a byte or a FLOP takes a second."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.graph import ALIGNED
from memplan.planning.slabs.lifetimes import Lifetime
from memplan.planning.slabs.price import Price, Pricer, SlabLimits, Streams
from memplan.planning.slabs.slabs import LoopOverSlabs, Slabs, Walls
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

LIMITS = SlabLimits(100, 50, 7)
LAUNCH = 1e-5
TOTAL = 4  # bytes of the mean while it is added up


def loops(program: NamedGraph, slabs: Slabs) -> list[LoopOverSlabs]:
    return Walls(program.graph, slabs.ops).loops(slabs)


def price(program: NamedGraph, slabs: Slabs) -> Price:
    return pricer_of(program, slabs).price(slabs, LIMITS)


def pricer_of(program: NamedGraph, slabs: Slabs) -> Pricer:
    return Pricer(Walls(program.graph, slabs.ops), SOLVABLE)


def lifetimes(program: NamedGraph, slabs: Slabs) -> Mapping[int, Lifetime]:
    pricer = pricer_of(program, slabs)
    return pricer.lifetimes.occupancy(pricer.walls.arranged(slabs), slabs).lifetimes


def test_what_is_elementwise_takes_no_time_and_kernels_take_theirs() -> None:
    assert pricer_of(norm(), norm().slabs(2)).op_seconds == [40.0, 1.0, 0.0, 1.0]


def test_streams_of_a_loop_go_on_beside_one_another_but_for_the_first_slab_and_the_last() -> None:
    assert Streams(3.0, 2.0, 5.0, 4).seconds(10) == 5.0 + 0.5 + 40 * LAUNCH
    assert Streams(3.0, 7.0, 5.0, 0).seconds(10) == 7.0 + 1.0


def test_a_norm_whose_input_is_written_to_the_host() -> None:
    """40 bytes of 8 rows, of which a slab has 2: 10 bytes; the input has 8 bytes, of which a window of 4 rows has 4."""
    program = norm(nbytes=40)
    slabs = program.on_host(program.slabs(2, stored=["a"]), "a")
    pricer = pricer_of(program, slabs)
    (first, second) = loops(program, slabs)
    assert pricer.streams(first, slabs) == Streams(0.0, 40.0, 41.0, 3)
    assert pricer.streams(second, slabs) == Streams(40.0, 0.0, 1.0, 2)
    assert pricer.trip_bytes(first, slabs) == 2 * (4 + 10) + 2 * (4 + 10)  # copies; the convolution
    assert pricer.trip_bytes(second, slabs) == 2 * 10
    host = 40 + 2 * 10  # a spare slab at each end
    assert lifetimes(program, slabs) == {
        program.values["x"]: Lifetime(0, 1, 8, reads=1),  # transposed
        program.values["a"]: Lifetime(0, 2, host, on_host=True, is_stored=True, reads=1),
    }
    seconds = 41.0 + 40.0 + 2 * 40 / 4 + 4 * (3 + 2) * LAUNCH
    assert price(program, slabs) == Price(seconds, 7 + 64 + TOTAL, host)


def test_the_same_on_the_device() -> None:
    program = norm(nbytes=40)
    slabs = program.slabs(2, stored=["a"])
    seconds = 41.0 + 1.0 + 4 * (3 + 2) * LAUNCH
    assert price(program, slabs) == Price(seconds, 7 + 40 + 64 + TOTAL, 0)  # behind: 40 + 20
    assert loops(program, slabs)[1].reads == (program.values["a"],)


def test_copies_take_passes_over_device_memory() -> None:
    """Of 40 bytes, on a device where a byte takes a second."""
    program = norm(nbytes=40)
    on_device = program.slabs(2, stored=["a"])
    on_host = program.on_host(on_device, "a")

    def kernels(slabs: Slabs) -> list[float]:
        pricer = Pricer(Walls(program.graph, slabs.ops), UNIT)
        return [pricer.streams(loop, slabs).kernels for loop in loops(program, slabs)]

    (written_s, read_s), (stacked_s, whole_s) = kernels(on_host), kernels(on_device)
    assert (written_s - stacked_s, read_s - whole_s) == (40.0, 3 * 40.0)


def test_rows_around_a_slab_are_made_twice() -> None:
    """The first of two convolutions makes four rows in a trip, of which two are its slab."""
    program = named_graph({"x": 8}, {"a": NamedOp({"x": HALO}), "b": NamedOp({"a": HALO})}, ["b"])
    (loop,) = loops(program, program.slabs(2))
    assert pricer_of(program, program.slabs(2)).streams(loop, program.slabs(2)).kernels == 2.0 + 1.0


def test_beyond_the_limits() -> None:
    assert LIMITS.excess(Price(1.0, 100, 50)) == 0
    assert LIMITS.excess(Price(1.0, 103, 40)) == 3
    assert LIMITS.excess(Price(1.0, 103, 54)) == 7


def test_what_is_made_outside_of_loops_is_there_until_its_last_reader() -> None:
    """`view` lies beside the first two loops, since kernels read it; `kept`, which it is made of, beside none.

    `twice` is read by the second loop. `zeros` are made where they are read. The first two loops add up eight numbers
    each, in float32.
    """
    program = named_graph(
        {"x": 8},
        {
            "kept": NamedOp({}, ["x"], on_axis=False, nbytes=5),
            "view": NamedOp({}, ["kept"], on_axis=False, nbytes=50, fusion="elementwise"),
            "sum": NamedOp({"x": ALIGNED}, reduces=True, fusion="reduction"),
            "zeros": NamedOp({}, on_axis=False, nbytes=90, fusion="elementwise"),
            "twice": NamedOp({}, ["sum", "view", "zeros"], on_axis=False, nbytes=3),
            "b": NamedOp({"x": ALIGNED}, ["twice"]),
            "again": NamedOp({"b": ALIGNED}, reduces=True, fusion="reduction"),
            "loss": NamedOp({}, ["again", "view"], on_axis=False, nbytes=1),
        },
        ["loss"],
    )
    assert pricer_of(program, program.slabs(2)).lifetimes.outside.by_level == [50 + 32, 53 + 32, 0]


def test_what_is_read_whole_lives_until_its_last_reader() -> None:
    """`a` by `outside` behind the first loop, `b` by the third loop, `c` by the user."""
    program = named_graph(
        {"x": 8},
        {
            "a": NamedOp({"x": ALIGNED}),
            "outside": NamedOp({}, ["a"], on_axis=False),
            "b": NamedOp({"x": ALIGNED}, ["outside"]),
            "c": NamedOp({"x": ALIGNED}, ["b"]),
        },
        ["c"],
    )
    slabs = program.slabs(2)
    (a, b, c) = (program.values[name] for name in "abc")
    assert pricer_of(program, slabs).lifetimes.read_whole == {a: 1, b: 3, c: 3}
    stored = {
        value: (lifetime.first, lifetime.end)
        for value, lifetime in lifetimes(program, slabs).items()
        if lifetime.is_stored
    }
    assert stored == {a: (0, 1), b: (1, 3), c: (2, 3)}


def test_a_sum_is_there_from_its_loop_to_its_last_reader() -> None:
    """200 bytes in half precision: 400 while they are added up, and a part of 200 in each of the four trips."""
    program = named_graph(
        {"x": 8},
        {
            "product": NamedOp({"x": ALIGNED}, reduces=True, nbytes=200, shape=(100,)),
            "b": NamedOp({"x": ALIGNED}, ["product"]),
            "sum": NamedOp({"b": ALIGNED}, reduces=True, nbytes=1, fusion="reduction"),
            "c": NamedOp({"b": ALIGNED}, ["sum", "product"], fusion="elementwise"),
        },
        ["c"],
    )
    slabs = program.slabs(2, stored=["b", "c"])
    pricer = pricer_of(program, slabs)
    assert pricer.lifetimes.outside.by_level == [400, 200 + TOTAL, 200 + 1]
    (first, _, _) = loops(program, slabs)
    assert pricer.trip_bytes(first, slabs) == 2 * 2 + 2 * 2 + 200
    on_unit = Pricer(Walls(program.graph, slabs.ops), UNIT)
    passes = on_unit.streams(first, slabs).kernels - on_unit.op_seconds[0]
    assert passes == 4 * 2 * (200 + 400)


def test_a_loop_that_takes_three_slabs_in_a_trip() -> None:
    """Of four slabs, in two trips: the second fetches four rows too many, and a third trip's six before it ends."""
    program = norm(nbytes=40)
    slabs = replace(
        program.on_host(program.slabs(2, stored=["a"]), "a"), at_once=frozenset({(1, 3)})
    )
    first, second = loops(program, slabs)
    value = program.values["a"]
    assert (first.spans[value], second.spans[value]) == ((0, 2), (0, 6))
    pricer = pricer_of(program, slabs)
    assert pricer.trip_bytes(second, slabs) == 2 * 30
    assert pricer.streams(second, slabs).kernels == 1.5  # of the 12 rows, 8 are the array's
    rows = 2 + 8 + (6 + 12 - 8)
    assert lifetimes(program, slabs)[value].nbytes == 40 * rows // 8


@given(slab_graphs(), st.data())
@settings(max_examples=50)
def test_slabs_compared_with_earlier_ones_cost_what_they_cost_alone(
    program: NamedGraph, data: st.DataObject
) -> None:
    if not program.graph.along:
        return
    compared = pricer_of(program, program.slabs(2))
    values = [
        value
        for op, along in program.graph.along.items()
        for value in (() if along.reduces else program.graph.graph.ops[op].outputs)
    ]
    subsets = st.frozensets(st.sampled_from(values)) if values else st.just(frozenset[int]())
    levels = st.integers(0, len(compared.walls.by_level) - 1)
    for _ in range(3):
        slabs = replace(
            program.slabs(2),
            stored=data.draw(subsets),
            on_host=data.draw(subsets),
        )
        if slabs.stored:
            pairs = st.frozensets(st.tuples(st.sampled_from(sorted(slabs.stored)), levels))
            slabs = replace(slabs, recomputed_in=data.draw(pairs))
        alone = pricer_of(program, slabs).price(slabs, LIMITS)
        assert compared.price(slabs, LIMITS) == alone
        if data.draw(st.booleans()):
            compared.walls.compare_with(slabs)
