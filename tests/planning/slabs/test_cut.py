"""Values of earlier loops that a loop reads, against all choices."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.graph import ALIGNED
from memplan.planning.slabs.cut import SlabCut
from memplan.planning.slabs.price import Pricer
from memplan.planning.slabs.slabs import Slabs, Walls
from tests.planning.slab_graphs import HALO, SOLVABLE, NamedGraph, NamedOp, named_graph, norm


@st.composite
def pairs_of_loops(draw: st.DrawFn) -> NamedGraph:
    """Some ops by slabs; a sum of the last; ops that want it and read others; a sum of all of these.

    None takes as long as a copy of any value.
    """
    ops: dict[str, NamedOp] = {}
    for number in range(draw(st.integers(1, 4))):
        ops[f"early{number}"] = drawn(draw, ["x", *ops])
    total = NamedOp({}, reduces=True, nbytes=1, fusion="reduction", seconds=0.0)
    ops["sum"] = replace(total, reads={[*ops][-1]: ALIGNED})
    early = [name for name in ops if name != "sum"]
    late = [f"late{number}" for number in range(draw(st.integers(1, 3)))]
    ops |= {name: replace(drawn(draw, early), whole=["sum"]) for name in late}
    ops["loss"] = replace(total, reads=dict.fromkeys(late, ALIGNED))
    outputs = draw(st.sets(st.sampled_from(early), max_size=1))
    return named_graph({"x": 8}, ops, sorted({"loss", *outputs}))


def drawn(draw: st.DrawFn, names: list[str]) -> NamedOp:
    reads = dict.fromkeys(draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)), HALO)
    return NamedOp(reads, nbytes=draw(st.integers(20, 60)), seconds=float(draw(st.integers(0, 40))))


def cut(graph: NamedGraph, weight: float = 1.0, on_device: Collection[int] = ()) -> set[int]:
    bare = graph.slabs(2)
    pricer = Pricer(Walls(graph.graph, bare.ops), SOLVABLE)
    return set(SlabCut(pricer, {1: weight}, {}, on_device).run())


def forced_of(graph: NamedGraph, bare: Slabs) -> set[int]:
    return {value for loop in Walls(graph.graph, bare.ops).loops(bare) for value in loop.writes}


def seconds(
    graph: NamedGraph, stored: Collection[int], weight: float, on_device: Collection[int]
) -> float:
    """Of the second loop: what it makes again, what it reads, and writing that."""
    bare = graph.slabs(2)
    walls = Walls(graph.graph, bare.ops)
    pricer = Pricer(walls, SOLVABLE)
    second = walls.loops(replace(bare, stored=frozenset(stored)))[-1]
    again = sum(pricer.op_seconds[op] for op in set(second.ops) if walls.levels[op] == 0)
    producer = graph.graph.graph.producer
    copied = [value for value in second.reads if value not in on_device]
    read = [value for value in copied if producer[value] is not None]
    new = [value for value in read if value not in forced_of(graph, bare)]
    return weight * again + sum(pricer.copy_seconds[value] for value in (*read, *new))


def subsets(values: Collection[int]) -> Iterator[frozenset[int]]:
    for size in range(len(values) + 1):
        yield from map(frozenset, combinations(sorted(values), size))


@given(pairs_of_loops(), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_no_other_values_read_take_less(graph: NamedGraph, weight: float, free: bool) -> None:
    early = {value for name, value in graph.values.items() if name.startswith("early")}
    on_device = {graph.values["early0"]} if free else set()
    values = cut(graph, weight, on_device)
    best = min(seconds(graph, stored, weight, on_device) for stored in subsets(early))
    assert values <= early
    assert seconds(graph, values, weight, on_device) == pytest.approx(best)


def test_a_value_that_is_dear_to_make_is_read_and_a_cheap_one_made_again() -> None:
    dear = norm(nbytes=8)
    cheap = norm(nbytes=30)
    assert dear.named(cut(dear)) == {"a"}  # two copies of 8 s against 40 s
    assert cheap.named(cut(cheap)) == set()
    assert cheap.named(cut(cheap, weight=2.0)) == {"a"}
    assert cheap.named(cut(cheap, on_device=[cheap.values["a"]])) == {"a"}


def test_what_is_written_in_any_case_is_read_where_it_is_wanted() -> None:
    """So loops are arranged. Making `cheap` again takes nothing, but would bring along reading all of `wanted`."""
    graph = named_graph(
        {"x": 8},
        {
            "wanted": NamedOp({"x": ALIGNED}, nbytes=41, seconds=0.0),
            "cheap": NamedOp({"wanted": ALIGNED}, nbytes=20, seconds=0.0),
            "sum": NamedOp({"cheap": ALIGNED}, reduces=True, fusion="reduction"),
            "late": NamedOp({"cheap": ALIGNED}, ["sum"]),
            "loss": NamedOp({"late": ALIGNED}, reduces=True, fusion="reduction"),
        },
        ["loss", "wanted"],
    )
    assert graph.named(cut(graph)) == {"cheap"}
