"""Shapes are read as they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.xla.shapes import Array, Shape, leaves, read_shape, shape_text

ARRAYS = st.builds(
    Array,
    st.sampled_from(["f32", "bf16", "pred", "s8", "u64", "c64", "f8e4m3fn", "token"]),
    st.lists(st.integers(0, 999), max_size=4).map(tuple),
    st.sampled_from(["", "{0}", "{1,0:S(5)}", "{}"]),
)
SHAPES = st.recursive(ARRAYS, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=12)


def with_comments(shape: Shape) -> str:
    return str(shape) if isinstance(shape, Array) else f"({', /*index=5*/'.join(map(with_comments, shape))})"


@given(SHAPES)
def test_shapes_are_read_as_they_are_written(shape: Shape) -> None:
    assert read_shape(with_comments(shape)) == read_shape(shape_text(shape)) == shape


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
