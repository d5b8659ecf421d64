"""Shapes as HLO writes them: arrays with a layout, and tuples of them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.xla.schema import ShapeMessage, UnreadableModuleError

HOST_SPACE = 5  # of a layout: memory of the host

_DTYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4",
    22: "u4", 23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3", 29: "f8e3m4",
    30: "s1", 31: "u1", 32: "f4e2m1fn", 33: "f8e8m0fnu", 34: "buffer", 35: "f6e3m2fn", 36: "f6e2m3fn",
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_TUPLE = 13

_SPACE = re.compile(r"S\(\d+\)")
_TILES = re.compile(r"T((?:\([\d,]+\))+)")
_TILE = re.compile(r"\(([\d,]+)\)")
_ELEMENT = re.compile(r"E\((\d+)\)")
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


def shape_text(shape: Shape) -> str:
    """The shape's text."""
    return str(shape) if isinstance(shape, Array) else f"({', '.join(map(shape_text, shape))})"


def leaves(shape: Shape) -> Iterator[Array]:
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def shape_message(shape: Shape) -> Any:
    if not isinstance(shape, Array):
        return ShapeMessage(element_type=_TUPLE, tuple_shapes=map(shape_message, shape))
    message = ShapeMessage(element_type=_NUMBERS[shape.dtype], dimensions=shape.dims)
    message.is_dynamic_dimension.extend([False] * len(shape.dims))
    if shape.dtype in ("token", "opaque") or (shape.dims and not shape.layout):
        return message
    message.layout.minor_to_major.extend(shape.order)
    message.layout.tail_padding_alignment_in_elements = 1
    for dimensions in shape.tiles:
        message.layout.tiles.add(dimensions=dimensions)
    message.layout.element_size_in_bits = shape.element_bits
    message.layout.memory_space = shape.space
    return message


def complete_layout(message: Any) -> None:
    """Give the arrays of a shape's message that have no layout the default one."""
    for part in message.tuple_shapes:
        complete_layout(part)
    is_array = _DTYPES.get(message.element_type, "token") not in ("token", "opaque")
    if is_array and not message.HasField("layout"):
        message.layout.minor_to_major.extend(reversed(range(len(message.dimensions))))
        message.layout.tail_padding_alignment_in_elements = 1


_shapes: dict[bytes, Shape] = {}  # 41,000 instructions of a module have 104 different ones


def shape_of(message: Any) -> Shape:
    """An array, or a tuple of shapes."""
    key = message.SerializeToString()
    if key not in _shapes:
        _shapes[key] = _read_shape(message)
    return _shapes[key]


def _read_shape(message: Any) -> Shape:
    if message.element_type == _TUPLE:
        return tuple(map(shape_of, message.tuple_shapes))
    dtype = _DTYPES.get(message.element_type)
    if dtype is None:
        raise UnreadableModuleError(f"memplan does not know XLA's element type {message.element_type}.")
    return Array(dtype, tuple(message.dimensions), _layout(message.layout))


def _layout(layout: Any) -> str:
    """The layout as HLO writes it."""
    order = ",".join(map(str, layout.minor_to_major))
    tiles = "".join(f"({','.join(map(str, tile.dimensions))})" for tile in layout.tiles)
    rest = f"T{tiles}" if tiles else ""
    if layout.tail_padding_alignment_in_elements > 1:
        rest += f"L({layout.tail_padding_alignment_in_elements})"
    if layout.element_size_in_bits:
        rest += f"E({layout.element_size_in_bits})"
    if layout.memory_space:
        rest += f"S({layout.memory_space})"
    text = f"{order}:{rest}" if rest else order
    return f"{{{text}}}" if text else ""
