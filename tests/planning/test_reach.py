"""Which values recomputation could want, by hand."""

from __future__ import annotations

from memplan.planning.reach import Reach
from tests.planning.graphs import chain, layout_of, training_chain


def test_chains_end_where_they_may_be_no_deeper() -> None:
    graph = training_chain([10] * 5)  # 0 argument, 1 to 5 forward, then backward operations that read them
    layout = layout_of(graph)
    last = max(number for number, reads in enumerate(layout.reads) if 4 in reads)
    shallow, deep = Reach(layout, 1, 1, 9), Reach(layout, 1, 3, 9)
    assert {1, 2} & set(shallow.wanted[last]) == set()
    assert 3 in shallow.wanted[last]
    assert 1 in deep.wanted[last]
    assert shallow.may_drop(4, last)
    assert not shallow.may_drop(3, last)
    assert Reach(layout, 1, 9, 1).wanted[last].keys() == shallow.wanted[last].keys()


def test_times_are_where_a_value_is_wanted() -> None:
    layout = layout_of(training_chain([10] * 4))
    reach = Reach(layout, 1, 2, 9)
    for value, times in reach.times.items():
        assert list(times) == [n for n, wanted in enumerate(reach.wanted) if value in wanted]
        assert layout.home[value] < times[0]


def test_arguments_outputs_and_small_values_are_not_decided_about() -> None:
    graph = chain(3)
    reach = Reach(layout_of(graph), 1, 9, 9)
    assert not reach.is_decided(0)  # argument
    assert not reach.is_decided(graph.outputs[0])
    assert reach.is_decided(1)
    assert not Reach(layout_of(graph), 11, 9, 9).is_decided(1)
