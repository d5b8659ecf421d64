"""Shapes as HLO writes them: arrays with a layout, and tuples of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.xla.schema import ShapeMessage, UnreadableModuleError

HOST_SPACE = 5  # of a layout: memory of the host

_DTYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128",
    19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz",
    25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3", 29: "f8e3m4", 30: "s1", 31: "u1",
    32: "f4e2m1fn", 33: "f8e8m0fnu", 34: "buffer", 35: "f6e3m2fn", 36: "f6e2m3fn",
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_TUPLE = 13

_NUMPY = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


class Layout(NamedTuple):
    """How the elements of an array lie in memory."""

    order: tuple[int, ...] = ()  # dimensions, from the one whose elements lie side by side
    tiles: tuple[tuple[int, ...], ...] = ()  # dimensions of the tiles, the outermost first
    padding: int = 1  # the count of elements is a multiple of this
    element_bits: int = 0  # bits of an element in memory, where they are not its type's; else 0
    space: int = 0  # the memory that it is in: 0 is the device's

    def __str__(self) -> str:
        tiles = "".join(f"({','.join(map(str, tile))})" for tile in self.tiles)
        rest = f"T{tiles}" if tiles else ""
        rest += f"L({self.padding})" if self.padding > 1 else ""
        rest += f"E({self.element_bits})" if self.element_bits else ""
        rest += f"S({self.space})" if self.space else ""
        text = ",".join(map(str, self.order)) + (f":{rest}" if rest else "")
        return f"{{{text}}}" if text else ""


NO_LAYOUT = Layout()


@dataclass(frozen=True, slots=True)
class Array:
    """One leaf of a shape."""

    dtype: str  # HLO's name: f32, bf16, pred
    dims: tuple[int, ...]
    layout: Layout = NO_LAYOUT  # as of a scalar before XLA assigns layouts

    @staticmethod
    def row_major(dtype: str, dims: Sequence[int]) -> Array:
        """An array whose layout is given: its elements lie in the order of its indices."""
        return Array(dtype, tuple(dims), Layout(tuple(reversed(range(len(dims))))))

    @property
    def on_host(self) -> bool:
        return self.layout.space == HOST_SPACE

    @property
    def in_host_memory(self) -> Array:
        """The same in the host's memory."""
        return Array(self.dtype, self.dims, self.layout._replace(space=HOST_SPACE))

    @property
    def is_row_major(self) -> bool:
        """Do its elements lie in the order of its indices, untiled and in the device's memory?
        Before XLA assigns layouts, every array's do.
        """
        order = self.layout.order
        return self.layout == Layout(order) and list(order) == sorted(order, reverse=True)

    @property
    def minor(self) -> int:
        """The dimension whose elements lie side by side; -1 of a scalar."""
        return self.layout.order[0] if self.layout.order else len(self.dims) - 1

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element; tokens have none."""
        return _bits(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: of whole tiles, where the layout has tiles."""
        tiles = self.layout.tiles
        size = self.size if not tiles else _tiled_size(self.dims, self.layout.order, tiles[0])
        return -(-size * self.bits // 8)

    @property
    def numpy_name(self) -> str:
        prefix = _letters(self.dtype)
        return _NUMPY.get(prefix, prefix) + self.dtype.removeprefix(prefix)

    @property
    def in_numpy(self) -> str:
        """Text such as `float32[64,112]`."""
        return f"{self.numpy_name}[{','.join(map(str, self.dims))}]"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{self.layout}"


def _tiled_size(dims: Sequence[int], order: Sequence[int], tile: Sequence[int]) -> int:
    """The elements of an array whose innermost dimensions are rounded up to a tile's.

    Inner tiles reorder elements only.
    """
    inner = [dims[dimension] for dimension in order]
    inner += [1] * (len(tile) - len(inner))
    for position, length in enumerate(reversed(tile)):
        inner[position] = -(-inner[position] // length) * length
    return math.prod(inner)


def _letters(dtype: str) -> str:
    """A type's letters up to the first digit."""
    return "".join(itertools.takewhile(str.isalpha, dtype))


@functools.cache
def _bits(dtype: str) -> int:
    digits = "".join(itertools.takewhile(str.isdigit, dtype.removeprefix(_letters(dtype))))
    return int(digits) if digits else 8 * (dtype == "pred")


Shape = Array | tuple["Shape", ...]


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
    if shape.dtype in ("token", "opaque") or (shape.dims and shape.layout == NO_LAYOUT):
        return message
    layout = shape.layout
    message.layout.minor_to_major.extend(layout.order)
    message.layout.tail_padding_alignment_in_elements = layout.padding
    for dimensions in layout.tiles:
        message.layout.tiles.add(dimensions=dimensions)
    message.layout.element_size_in_bits = layout.element_bits
    message.layout.memory_space = layout.space
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
        raise UnreadableModuleError(
            f"memplan does not know XLA's element type {message.element_type}."
        )
    return Array(dtype, tuple(message.dimensions), _layout(message.layout))


def _layout(message: Any) -> Layout:
    return Layout(
        tuple(message.minor_to_major),
        tuple(tuple(tile.dimensions) for tile in message.tiles),
        max(1, message.tail_padding_alignment_in_elements),
        message.element_size_in_bits,
        message.memory_space,
    )
