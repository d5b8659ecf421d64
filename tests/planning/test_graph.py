"""Facts that follow from the problem statement."""

from __future__ import annotations

import random

from hypothesis import given

from memplan.planning.graph import Graph, Op, Value
from tests.planning.graphs import DRAWS, Builder, chain, diamond, fan_out, random_graph


def test_producers_and_readers_of_a_diamond() -> None:
    graph = diamond()
    assert graph.producer == (None, 0, 1, 2, 3)
    assert graph.readers == ((0,), (1, 2), (3,), (3,), ())
    assert graph.returned == {4}


def test_a_value_read_twice_by_one_operation_has_one_reader() -> None:
    b = Builder()
    x = b.argument(4)
    graph = b.build(b.op([x, x], 4), b.op([x], 4))
    assert graph.readers[x] == (0, 1)


def test_fan_out_is_read_by_everyone() -> None:
    graph = fan_out(5)
    assert graph.readers[1] == (1, 2, 3, 4, 5) and len(graph.returned) == 5


def test_resident_bytes_are_the_inputs() -> None:
    b = Builder()
    b.argument(3)
    b.argument(4, donated=True)
    assert b.build(b.op([0], 100)).resident_nbytes == 7
    assert chain(0, nbytes=5).resident_nbytes == 5


def donating(outputs: tuple[int, ...], *donated: bool) -> dict[int, int]:
    """What is reused where three arguments of four bytes and three results of four bytes meet."""
    b = Builder()
    inputs = [b.argument(4, donated=flag) for flag in donated]
    for _ in range(3):
        b.op(inputs[:1], 4)
    return b.build(*outputs).reused


def test_donated_buffers_go_to_outputs_first_come_first_served() -> None:
    assert donating((3, 4), False, False, False) == {}
    assert donating((3, 4), False, True, False) == {3: 1}
    assert donating((4, 3), False, True, True) == {4: 1, 3: 2}
    assert donating((3, 4, 5), True, False, True) == {3: 0, 4: 2}


def test_an_output_given_twice_takes_one_buffer() -> None:
    assert donating((3, 3, 4), True, True, False) == {3: 0, 4: 1}


def test_an_argument_that_is_returned_is_not_reused() -> None:
    assert donating((0, 3), True, False, False) == {}
    assert donating((0, 3), True, True, False) == {3: 1}


def test_only_equal_shape_and_dtype_are_reused() -> None:
    values = (
        Value("a", 8, (2,), "float32", "argument", donated=True),
        Value("b", 8, (1, 2), "float32"),
        Value("c", 8, (2,), "int32"),
        Value("d", 8, (2,), "float32"),
    )
    ops = tuple(Op("made", (0,), (number,)) for number in (1, 2, 3))
    assert Graph(values, ops, (0,), (1, 2, 3)).reused == {3: 0}


def test_where_names_the_line_if_there_is_one() -> None:
    assert Op("add", (), ()).where == "add"
    assert Op("add", (), (), source="net.py:3").where == "add (net.py:3)"


@given(DRAWS)
def test_relations_agree_with_the_operations(draw: random.Random) -> None:
    graph = random_graph(draw)
    for number, op in enumerate(graph.ops):
        assert all(graph.producer[value] == number for value in op.outputs)
        assert all(number in graph.readers[value] for value in op.inputs)
    assert sum(map(len, graph.readers)) == sum(len(set(op.inputs)) for op in graph.ops)
    assert len(set(graph.reused.values())) == len(graph.reused)
    for output, argument in graph.reused.items():
        assert graph.values[argument].donated and argument not in graph.returned
        assert graph.values[argument].shape == graph.values[output].shape and output in graph.returned
