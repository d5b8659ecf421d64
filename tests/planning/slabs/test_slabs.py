"""Programs in loops over slabs: levels, walls, recomputation and rows, by hand and at random."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.graph import ALIGNED, Rows, Span
from memplan.planning.slabs.slabs import (
    LoopOverSlabs,
    Slabs,
    Walls,
    arrange,
    least_rows,
    slab_rows,
    trips_of,
)
from tests.planning.slab_graphs import (
    HALO,
    POOL,
    UPSAMPLE,
    NamedGraph,
    NamedOp,
    named_graph,
    norm,
    slab_graphs,
    slabs_of,
)

HALF = Fraction(1, 2)


def test_a_sum_is_a_wall_and_behind_it_everything_is_made_again() -> None:
    assert norm().arranged(norm().slabs(2)) == [
        (["a", "mean"], {"x"}, set(), {"mean"}, {"x": (-1, 3), "a": (0, 2)}),
        (["a", "b", "loss"], {"x"}, set(), {"loss"}, {"x": (-1, 3), "a": (0, 2), "b": (0, 2)}),
    ]
    assert Walls(norm().graph, norm().slabs(2).ops).levels == {0: 0, 1: 0, 2: 1, 3: 1}


def test_what_is_stored_is_written_by_the_loop_that_makes_it_and_read_by_later_ones() -> None:
    assert norm().arranged(norm().slabs(2, stored=["a"])) == [
        (["a", "mean"], {"x"}, {"a"}, {"mean"}, {"x": (-1, 3), "a": (0, 2)}),
        (["b", "loss"], {"a"}, set(), {"loss"}, {"a": (0, 2), "b": (0, 2)}),
    ]


def test_what_runs_whole_stands_between_loops_and_gets_whole_values() -> None:
    assert norm().arranged(norm().slabs(2, ["a", "mean"])) == [
        (["a", "mean"], {"x"}, {"a"}, {"mean"}, {"x": (-1, 3), "a": (0, 2)}),
        "b",
        "loss",
    ]
    assert norm().arranged(norm().slabs(2, ["b", "loss"])) == [
        "a",
        "mean",
        (["b", "loss"], {"a"}, set(), {"loss"}, {"a": (0, 2), "b": (0, 2)}),
    ]


def test_halos_add_up_and_a_value_has_the_rows_of_all_its_readers() -> None:
    program = named_graph(
        {"x": 8},
        {
            "a": NamedOp({"x": HALO}),
            "b": NamedOp({"a": HALO}),
            "c": NamedOp({"a": ALIGNED, "b": Rows(before=2)}),
        },
        ["c"],
    )
    spans = {"x": (-4, 5), "a": (-3, 4), "b": (-2, 2), "c": (0, 4)}
    assert program.arranged(program.slabs(4)) == [(["a", "b", "c"], {"x"}, {"c"}, set(), spans)]


def test_what_carries_makes_the_rows_of_its_slab_whatever_is_read_of_them() -> None:
    """And of the rows around it those that are read, as anything does."""
    shifted = Rows(before=-3)
    wide = Rows(before=2, reach=5)
    program = named_graph(
        {"x": 8},
        {
            "a": NamedOp({"x": ALIGNED}, carries=True),
            "b": NamedOp({"a": shifted}, rows=5),
            "c": NamedOp({"x": HALO}, carries=True),
            "d": NamedOp({"c": wide}),
        },
        ["b", "d"],
    )
    spans = {"x": (-3, 7), "a": (0, 7), "b": (0, 4), "c": (-2, 6), "d": (0, 4)}
    loop = ["a", "b", "c", "d"], {"x"}, {"b", "d"}, set(), spans
    assert program.arranged(program.slabs(4)) == [loop]


def test_rows_behind_strides() -> None:
    """Five of nine rows, and back."""
    program = named_graph(
        {"x": 9},
        {
            "pooled": NamedOp({"x": POOL}, rows=5, scale=HALF),
            "a": NamedOp({"pooled": HALO}, rows=5, scale=HALF),
            "wide": NamedOp({"a": UPSAMPLE}, rows=10),
            "b": NamedOp({"wide": HALO}, rows=10),
        },
        ["b"],
    )
    slabs = program.slabs(4)
    spans = {"x": (-4, 8), "pooled": (-2, 4), "a": (-1, 3), "wide": (-1, 5), "b": (0, 4)}
    assert program.arranged(slabs) == [(["pooled", "a", "wide", "b"], {"x"}, {"b"}, set(), spans)]
    numbers = [program.values[name] for name in ("x", "pooled", "wide")]
    assert [slab_rows(program.graph, slabs, value) for value in numbers] == [4, 2, 4]
    assert least_rows(program.graph, slabs.ops) == 2
    assert least_rows(program.graph, [program.ops["b"]]) == 1
    assert trips_of(program.graph, slabs) == 3 and trips_of(program.graph, program.slabs(10)) == 1
    assert trips_of(program.graph, program.slabs(2, ["pooled", "a"])) == 5


@pytest.mark.parametrize(
    ("scales", "rows"),
    [([HALF], 2), ([Fraction(1, 4), HALF], 4), ([HALF, Fraction(1, 3)], 6), ([Fraction(3, 2)], 2)],
)
def test_the_least_rows_are_whole_everywhere(scales: list[Fraction], rows: int) -> None:
    ops = {f"a{n}": NamedOp({"x": ALIGNED}, scale=scale) for n, scale in enumerate(scales)}
    program = named_graph({"x": 12}, ops, [*ops])
    assert least_rows(program.graph, program.slabs(1).ops) == rows


def test_who_reads_a_value_whole_stands_behind_a_wall_too() -> None:
    ops = {"a": NamedOp({"x": ALIGNED}), "b": NamedOp({"a": ALIGNED}, ["a"])}
    program = named_graph({"x": 8}, ops, ["b"])
    assert program.arranged(program.slabs(2)) == [
        (["a"], {"x"}, {"a"}, set(), {"x": (0, 2), "a": (0, 2)}),
        (["b"], {"a"}, {"b"}, set(), {"a": (0, 2), "b": (0, 2)}),
    ]


def test_a_sum_that_lies_on_the_axis_elsewhere_is_read_like_any_array() -> None:
    program = norm()
    total = program.values["mean"]
    along = dict(program.graph.along)
    along[program.ops["b"]] = type(along[0])(((total, ALIGNED),), program.values["b"], False)
    graph = type(program.graph)(
        program.graph.graph,
        program.graph.outputs,
        {**program.graph.scales, total: Fraction(1)},
        {**program.graph.sizes, total: 8},
        along,
    )
    program = NamedGraph(graph, program.values, program.ops)
    first, second = program.arranged(program.slabs(2, ["a", "mean", "b", "loss"]))
    assert first[:4] == (["a", "mean"], {"x"}, {"a"}, {"mean"})  # `b` reads all of `a`
    assert second == (["b", "loss"], {"mean"}, set(), {"loss"}, {"mean": (0, 2), "b": (0, 2)})


def test_what_nobody_wants_is_in_no_loop() -> None:
    ops = {"a": NamedOp({"x": ALIGNED}), "b": NamedOp({"x": ALIGNED})}
    program = named_graph({"x": 8}, ops, ["b"])
    assert [loop[0] for loop in program.arranged(program.slabs(2))] == [["b"]]


@given(st.data())
def test_every_arrangement_can_run(data: Any) -> None:
    """What an op or a loop reads is there before, whole or by slabs; rows that an op reads are in the window."""
    program = data.draw(slab_graphs())
    slabs = data.draw(slabs_of(program))
    graph = program.graph.graph
    whole = {program.values["x"], program.values["y"]}
    for item in arrange(program.graph, slabs):
        if isinstance(item, LoopOverSlabs):
            assert whole.issuperset(item.reads) and (item.sums or item.writes)
            check_loop(program, slabs, item, whole)
            whole.update(item.writes, *(graph.ops[op].outputs for op in item.sums))
        else:
            assert item not in slabs.ops and whole.issuperset(graph.ops[item].inputs)
            whole.update(graph.ops[item].outputs)
    assert whole >= program.graph.outputs


@given(st.data())
def test_effects_keep_their_order_and_all_else_its_place(data: Any) -> None:
    """Every op outside of loops may have one; without effects nothing is on a higher level than it must be."""
    program = data.draw(slab_graphs())
    slabs = data.draw(slabs_of(program))
    outside = [number for number in range(len(program.graph.graph.ops)) if number not in slabs.ops]
    effects = frozenset(number for number in outside if data.draw(st.booleans()))
    graph = replace(program.graph, effects=effects)
    order = [number for number in arrange(graph, slabs) if number in effects]
    assert order == sorted(effects)
    plain = Walls(program.graph, slabs.ops).levels
    levels = Walls(graph, slabs.ops).levels
    assert all(levels[number] >= level for number, level in plain.items())
    if len(effects) <= 1:
        assert levels == plain


def check_loop(program: NamedGraph, slabs: Slabs, loop: LoopOverSlabs, whole: set[int]) -> None:
    graph = program.graph
    in_slabs = set(loop.reads)
    for number in loop.ops:
        along = graph.along[number]
        op = graph.graph.ops[number]
        by_slabs = [value for value, _ in along.reads]
        assert number in slabs.ops and in_slabs.issuperset(by_slabs)
        assert whole.issuperset(value for value in op.inputs if value not in by_slabs)
        span = loop.spans[along.base]
        if along.reduces:
            assert covers(span, (0, slab_rows(graph, slabs, along.base)))
            span = 0, slab_rows(graph, slabs, along.base)
        assert all(covers(loop.spans[value], rows.of(*span)) for value, rows in along.reads)
        in_slabs.update(() if along.reduces else op.outputs)
    assert in_slabs.issuperset(loop.writes)
    assert all(
        covers(loop.spans[value], (0, slab_rows(graph, slabs, value))) for value in loop.writes
    )


def covers(span: Span, wanted: Span) -> bool:
    return span[0] <= wanted[0] and span[1] >= wanted[1]
