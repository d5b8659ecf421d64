"""Random windows over arrays, for convolutions and for reductions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax

SEEDS = st.integers(0, 2**32 - 1)


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Dim(NamedTuple):
    """One dimension of a window over an array of so many rows."""

    rows: int
    size: int
    stride: int
    padding: tuple[int, int]
    dilation: int
    apart: int


@st.composite
def dims(
    draw: Any,
    *,
    negative: bool = True,
    dilation: int = 3,
    apart: int = 2,
    max_rows: int = 7,
    divisible: bool = False,
) -> Dim:
    """With at least one row made; `divisible`: at times as blocks that do not overlap."""
    if divisible and draw(st.booleans()):
        size = draw(st.integers(1, 2))
        return Dim(size * draw(st.integers(1, 6)), size, size, (0, 0), 1, 1)
    rows, size, stride = (draw(st.integers(1, limit)) for limit in (max_rows, 3, 3))
    wide, between = draw(st.integers(1, dilation)), draw(st.integers(1, apart))
    low, high = (
        draw(st.integers(-2 if negative else 0, 3)),
        draw(st.integers(-2 if negative else 0, 3)),
    )
    missing = (size - 1) * between + 1 - ((rows - 1) * wide + 1 + low + high)
    return Dim(rows, size, stride, (low, high + max(missing, 0)), wide, between)


class Convolution(NamedTuple):
    space: list[Dim]
    groups: int
    layout: int
    seed: int

    def run(self, x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            [dim.stride for dim in self.space],
            [dim.padding for dim in self.space],
            lhs_dilation=[dim.dilation for dim in self.space],
            rhs_dilation=[dim.apart for dim in self.space],
            dimension_numbers=self.numbers,
            feature_group_count=self.groups,
        )

    @property
    def numbers(self) -> tuple[str, str, str]:
        space = "DHW"[-len(self.space) :]
        return [
            (f"N{space}C", f"{space}IO", f"N{space}C"),
            (f"NC{space}", f"OI{space}", f"C{space}N"),
        ][self.layout]

    @property
    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = {"N": 2, "C": 4, "I": 4 // self.groups, "O": 2}
        names = "DHW"[-len(self.space) :]
        image = sizes | {name: dim.rows for name, dim in zip(names, self.space, strict=True)}
        filters = sizes | {name: dim.size for name, dim in zip(names, self.space, strict=True)}
        lhs, rhs, _ = self.numbers
        image_shape = (image[name] for name in lhs)
        filter_shape = (filters[name] for name in rhs)
        return floats(self.seed, *image_shape), floats(self.seed + 1, *filter_shape)


def convolutions(**limits: Any) -> st.SearchStrategy[Convolution]:
    # XLA:CPU of jax 0.11 reads past an operand of 2 rows that is cropped to one, and gives other numbers each time.
    limits = {"negative": jax.__version_info__ >= (0, 12), **limits}
    spaces = st.lists(dims(**limits), min_size=1, max_size=3)
    return st.builds(Convolution, spaces, st.sampled_from([1, 2]), st.sampled_from([0, 1]), SEEDS)


class Windows(NamedTuple):
    """Windows over an array of two dimensions."""

    space: tuple[Dim, Dim]
    seed: int

    @property
    def array(self) -> np.ndarray:
        return floats(self.seed, *(dim.rows for dim in self.space))

    def of(self, name: str) -> list[Any]:
        return [getattr(dim, name) for dim in self.space]

    def reduce(self, x: Any, start: Any, reducer: Callable[..., Any]) -> Any:
        window = map(self.of, ("size", "stride", "padding", "dilation", "apart"))
        return lax.reduce_window(x, start, reducer, *window)


def windows(**limits: Any) -> st.SearchStrategy[Windows]:
    return st.builds(Windows, st.tuples(dims(**limits), dims(**limits)), SEEDS)
