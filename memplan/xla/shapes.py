"""Shapes as HLO writes them: arrays with a layout, and tuples of them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HOST_SPACE = 5  # of a layout: memory of the host

_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?P<layout>\{[^}]*\})?|(?P<open>\()|(?P<close>\))")
_SPACE = re.compile(r"S\(\d+\)")
_TILES = re.compile(r"T((?:\([\d,]+\))+)")
_TILE = re.compile(r"\(([\d,]+)\)")
_ELEMENT = re.compile(r"E\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_NUMPY = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True, slots=True)
class Array:
    """One leaf of a shape."""

    dtype: str  # HLO's name: f32, bf16, pred
    dims: tuple[int, ...]
    layout: str = ""  # as it is written, braces included

    @staticmethod
    def row_major(dtype: str, dims: Sequence[int]) -> Array:
        """An array whose layout is given: its elements lie in the order of its indices."""
        layout = f"{{{','.join(map(str, reversed(range(len(dims)))))}}}" if dims else ""
        return Array(dtype, tuple(dims), layout)

    @property
    def on_host(self) -> bool:
        return f"S({HOST_SPACE})" in self.layout

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions from the one whose elements lie side by side; () without a layout."""
        return tuple(map(int, re.findall(r"\d+", self.layout.partition(":")[0])))

    @property
    def space(self) -> int:
        """The memory that it is in: 0 is the device's."""
        space = _SPACE.search(self.layout)
        return int(space[0][2:-1]) if space else 0

    @property
    def tiles(self) -> tuple[tuple[int, ...], ...]:
        """Dimensions of the tiles that it lies in, the outermost first."""
        tiles = _TILES.search(self.layout)
        return tuple(tuple(map(int, tile.split(","))) for tile in _TILE.findall(tiles[1])) if tiles else ()

    @property
    def element_bits(self) -> int:
        """Bits of an element in memory, where they are not its type's; else 0."""
        bits = _ELEMENT.search(self.layout)
        return int(bits[1]) if bits else 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element; tokens have none."""
        return _bits(self.dtype)

    @property
    def nbytes(self) -> int:
        return -(-self.size * self.bits // 8)

    @property
    def minor(self) -> int:
        """The dimension whose elements lie side by side; -1 of a scalar."""
        first = re.match(r"\{(\d+)", self.layout)
        return int(first[1]) if first else len(self.dims) - 1

    @property
    def numpy_name(self) -> str:
        prefix = re.match(r"[a-z]+", self.dtype)
        return _NUMPY.get(prefix[0], prefix[0]) + self.dtype[prefix.end() :] if prefix else self.dtype

    @property
    def in_numpy(self) -> str:
        """Text such as `float32[64,112]`."""
        return f"{self.numpy_name}[{','.join(map(str, self.dims))}]"

    @property
    def in_host_memory(self) -> Array:
        """The same in the host's memory; tiles and the width of elements come before the space (`Layout::ToString`)."""
        space = f"S({HOST_SPACE})"
        order, _, rest = self.layout.strip("{}").partition(":")
        rest = _SPACE.sub(space, rest) if _SPACE.search(rest) else rest + space
        return Array(self.dtype, self.dims, f"{{{order}:{rest}}}")

    @property
    def is_row_major(self) -> bool:
        """Do its elements lie in the order of its indices, untiled and in the device's memory? Before XLA assigns
        layouts, every array's do.
        """
        order = [int(dim) for dim in re.findall(r"\d+", self.layout)]
        return ":" not in self.layout and order == sorted(order, reverse=True)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{self.layout}"


@functools.cache
def _bits(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8 * (dtype == "pred")


Shape = Array | tuple["Shape", ...]


@functools.lru_cache(maxsize=4096)  # 41,000 lines of a module have 104 different ones
def read_shape(text: str) -> Shape:
    """An array, or a tuple of shapes."""
    stack: list[list[Shape]] = [[]]
    for found in _SHAPE.finditer(_COMMENT.sub("", text) if "/*" in text else text):
        if found["open"]:
            stack.append([])
        elif found["close"]:
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            dims = tuple(int(side) for side in found["dims"].replace("<=", "").split(",") if side)
            stack[-1].append(Array(found["dtype"], dims, found["layout"] or ""))
    return stack[0][0]


def shape_text(shape: Shape) -> str:
    """The shape's text."""
    return str(shape) if isinstance(shape, Array) else f"({', '.join(map(shape_text, shape))})"


def bare(shape: Shape) -> Shape:
    """The shape without layouts, as in a computation's first line."""
    return Array(shape.dtype, shape.dims) if isinstance(shape, Array) else tuple(map(bare, shape))


def leaves(shape: Shape) -> Iterator[Array]:
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)
