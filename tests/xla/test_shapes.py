"""Shapes are read as they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.xla.shapes import Array, Layout, Shape, leaves, shape_message, shape_of
from tests.hlo import read_instruction

DTYPES = st.sampled_from(["f32", "bf16", "pred", "s8", "u64", "c64", "f8e4m3fn"])
TILES = st.sampled_from([(), ((8, 128), (2, 1))])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dims = draw(st.lists(st.integers(0, 999), max_size=4))
    order = tuple(draw(st.permutations(range(len(dims)))))
    bits, space = draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 5]))
    layout = Layout(order, draw(TILES), element_bits=bits, space=space)
    return Array(draw(DTYPES), tuple(dims), layout)


ARRAYS = arrays() | st.just(Array("token", ()))
SHAPES = st.recursive(ARRAYS, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=12)


def shape_text(shape: Shape) -> str:
    """The shape as HLO writes it."""
    return str(shape) if isinstance(shape, Array) else f"({', '.join(map(shape_text, shape))})"


def read_shape(text: str) -> Shape:
    """What XLA reads as this shape, as memplan reads it."""
    return read_instruction(f"  %p = {text} parameter(0)").shape


@given(SHAPES)
def test_shapes_are_read_as_they_are_written(shape: Shape) -> None:
    assert read_shape(shape_text(shape)) == shape_of(shape_message(shape)) == shape


@given(st.lists(st.integers(0, 999), min_size=1, max_size=4).map(tuple))
def test_no_layout_stays_none(dims: tuple[int, ...]) -> None:
    array = Array("f32", dims)
    assert shape_of(shape_message(array)) == array


@pytest.mark.parametrize(
    ("text", "nbytes", "on_host"),
    [
        ("f32[2,3]{1,0}", 24, False),
        ("pred[5]{0}", 5, False),
        ("bf16[4]{0:S(5)}", 8, True),
        ("s4[3]{0}", 2, False),
        ("token[]", 0, False),
        ("f32[<=4]{0}", 16, False),
        ("c128[2]{0}", 32, False),
    ],
)
def test_bytes_and_memory_of_an_array(text: str, nbytes: int, on_host: bool) -> None:
    (array,) = leaves(read_shape(text))
    assert (array.nbytes, array.on_host) == (nbytes, on_host)
