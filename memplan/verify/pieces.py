"""Pieces of arrays: elements of one source in mixed-radix order, each summed over some devices.

A piece has an index of several digits, the first varying slowest. The element with index
`(i[0], i[1], ...)` stands at `start + sum(i[d] * digits[d].stride)` in the source, in row-major
order, and has the owners `owners[sum(i[d] * digits[d].owner_stride)]`.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

ZERO = -1  # the source of zeros


class Digit(NamedTuple):
    """One digit of a piece's index."""

    size: int  # how many values it has
    stride: int  # in the source, in elements
    owner_stride: int  # in the piece's list of owners


class Piece(NamedTuple):
    """Elements of a source, in order.

    Attributes:
      source: the number of the source, or `ZERO`.
      start: the position of the first element in the source, in row-major order.
      digits: of the index of an element.
      owners: numbers of maps (see `Owners`): over which devices each element is summed.
    """

    source: int
    start: int
    digits: tuple[Digit, ...]
    owners: tuple[int, ...]

    @property
    def size(self) -> int:
        return count(self.digits)


@functools.lru_cache(maxsize=1 << 16)  # the arrays of a module have few different ones
def count(digits: tuple[Digit, ...]) -> int:
    """How many elements digits count out."""
    return math.prod(digit.size for digit in digits)


Row = tuple[Piece, ...]  # the elements of an array in row-major order


def zeros(size: int) -> Piece:
    return Piece(ZERO, 0, (Digit(size, 0, 0),) if size > 1 else (), ())


def size_of(row: Row) -> int:
    return sum(piece.size for piece in row)


def normal(piece: Piece) -> Piece:
    """The same piece in its one notation.

    No digit has size 1, no two digits could be one, and the owners are a row-major table of the
    digits along which they vary.
    """
    if piece.source == ZERO:
        return zeros(piece.size)
    digits = [digit for digit in piece.digits if digit.size > 1]
    owners = piece.owners
    if len(owners) > 1:
        digits, owners = _with_owner_table(digits, owners)
    else:
        digits = [digit._replace(owner_stride=0) for digit in digits]
    merged: list[Digit] = []
    for digit in digits:
        if merged and _continues(merged[-1], digit):
            merged[-1] = digit._replace(size=merged[-1].size * digit.size)
        else:
            merged.append(digit)
    return Piece(piece.source, piece.start, tuple(merged), owners)


def _continues(slow: Digit, fast: Digit) -> bool:
    """Do two neighbouring digits count like one?"""
    strides = fast.size * fast.stride, fast.size * fast.owner_stride
    return (slow.stride, slow.owner_stride) == strides


def _with_owner_table(
    digits: Sequence[Digit],
    owners: Sequence[int],
) -> tuple[list[Digit], tuple[int, ...]]:
    """Digits and owners, with the owners as a row-major table of the digits they vary along."""
    axes = [number for number, digit in enumerate(digits) if digit.owner_stride]
    offsets = [np.arange(digits[axis].size) * digits[axis].owner_stride for axis in axes]
    table = np.asarray(owners)[sum(np.ix_(*offsets), start=np.zeros((1,) * len(axes), int))]
    for dim in range(len(axes)):
        first = table.take([0], dim)
        if (table == first).all():
            table = first
    ordered = [digit._replace(owner_stride=0) for digit in digits]
    stride = 1
    for axis, size in reversed(list(zip(axes, table.shape, strict=True))):
        if size > 1:
            ordered[axis] = ordered[axis]._replace(owner_stride=stride)
            stride *= size
    return ordered, tuple(table.ravel().tolist())


def joined(pieces: Iterable[Piece]) -> Row:
    """Pieces one behind the other; neighbours that are neighbours in their source are one piece."""
    row: list[Piece] = []
    for piece in pieces:
        if row and (union := _union(row[-1], piece)) is not None:
            row[-1] = union
        else:
            row.append(piece)
    return tuple(row)


def _union(first: Piece, second: Piece) -> Piece | None:
    """Two pieces as one; None if the second does not continue the first in the source."""
    if first.source != second.source or first.owners != second.owners or len(first.owners) > 1:
        return None
    if first.source == ZERO:
        return zeros(first.size + second.size)
    stride, inner = 1, ()
    for piece in (first, second):
        if piece.digits:
            stride = piece.digits[0].stride
            inner = piece.digits[1:]
    first_size = _steps(first, stride, inner)
    second_size = _steps(second, stride, inner)
    if not first_size or not second_size or second.start != first.start + first_size * stride:
        return None
    digit = Digit(first_size + second_size, stride, 0)
    return normal(Piece(first.source, first.start, (digit, *inner), first.owners))


def _steps(piece: Piece, stride: int, inner: tuple[Digit, ...]) -> int:
    """The size of a piece's first digit that has this stride, before the inner digits; else 0."""
    if piece.digits == inner:
        return 1
    if not piece.digits or piece.digits[0].stride != stride or piece.digits[1:] != inner:
        return 0
    return piece.digits[0].size


def cut(piece: Piece, low: int, high: int) -> list[Piece]:
    """The elements `low` to `high` of a piece."""
    if (window := _window(piece.digits, low, high)) is not None:
        return [_windowed(piece, window)]
    first, inner = piece.digits[0], piece.digits[1:]
    size = count(inner)
    value = low // size  # of the first digit
    if value == (high - 1) // size:
        block = _windowed(piece, _Window(value * first.stride, value * first.owner_stride, inner))
        return cut(block, low - value * size, high - value * size)
    marks = sorted({low, -(-low // size) * size, high // size * size, high})
    return [part for start, end in itertools.pairwise(marks) for part in cut(piece, start, end)]


def cut_row(row: Row, low: int, high: int) -> Row:
    """The elements `low` to `high` of a row."""
    marks = ends(row)
    pieces: list[Piece] = []
    for number in range(bisect.bisect_right(marks, low) - 1, bisect.bisect_left(marks, high)):
        start, end = marks[number], marks[number + 1]
        pieces += cut(row[number], max(low, start) - start, min(high, end) - start)
    return joined(pieces)


def cut_at(row: Row, marks: Iterable[int]) -> list[Piece]:
    """The row in pieces, each of which ends at a mark or where a piece of the row ended."""
    return [piece for low, high in itertools.pairwise(marks) for piece in cut_row(row, low, high)]


def ends(row: Row) -> list[int]:
    return [0, *itertools.accumulate(piece.size for piece in row)]


class _Window(NamedTuple):
    """A part of a piece's index."""

    start: int  # how far into the source
    owner_start: int  # how far into the owners
    digits: tuple[Digit, ...]


def _windowed(piece: Piece, window: _Window) -> Piece:
    start = piece.start + window.start
    return normal(Piece(piece.source, start, window.digits, piece.owners[window.owner_start :]))


def _window(digits: tuple[Digit, ...], low: int, high: int) -> _Window | None:
    """The index values `low` to `high`; None if digits cannot count them out."""
    if not digits:
        return _Window(0, 0, ())
    first, inner = digits[0], digits[1:]
    size = count(inner)
    value = low // size
    start, owner_start = value * first.stride, value * first.owner_stride
    if low % size == 0 and high % size == 0:
        return _Window(start, owner_start, (first._replace(size=(high - low) // size), *inner))
    if value != (high - 1) // size:
        return None
    window = _window(inner, low - value * size, high - value * size)
    if window is None:
        return None
    return _Window(start + window.start, owner_start + window.owner_start, window.digits)


def split(piece: Piece, sizes: Sequence[int]) -> list[tuple[Digit, ...]] | None:
    """The digits of each dimension of an array that is one piece.

    None where the digits do not follow the dimensions.
    """
    digits = list(piece.digits)
    dims: list[tuple[Digit, ...]] = []
    for size in reversed(sizes):
        dim: list[Digit] = []
        while size > 1:
            digit = digits.pop()
            if size % digit.size and digit.size % size:
                return None
            if digit.size > size:
                outer = digit.size // size
                digits.append(Digit(outer, digit.stride * size, digit.owner_stride * size))
                digit = digit._replace(size=size)
            dim.insert(0, digit)
            size //= digit.size
        dims.insert(0, tuple(dim))
    return dims


def narrowed(row: Row, sizes: tuple[int, int, int], low: int, high: int) -> Row | None:
    """A range of the middle one of three dimensions; None where digits cannot count it out."""
    outer, _, inner = sizes
    if outer == 1:
        return cut_row(row, low * inner, high * inner)
    if len(row) != 1 or (dims := split(row[0], sizes)) is None:
        return None
    if (window := _window(dims[1], low, high)) is None:
        return None
    return (_windowed(row[0], window._replace(digits=(*dims[0], *window.digits, *dims[2]))),)


def turned(row: Row, sizes: Sequence[int], order: Sequence[int]) -> Row | None:
    """A transposed array; None where digits cannot count it out."""
    moving = [dim for dim in order if sizes[dim] > 1]
    if moving == sorted(moving):
        return row
    if len(row) != 1 or (dims := split(row[0], sizes)) is None:
        return None
    digits = tuple(digit for dim in order for digit in dims[dim])
    return (normal(row[0]._replace(digits=digits)),)


def stacked(rows: Sequence[Row], outer: int) -> Row | None:
    """Arrays one beside the other along a dimension behind `outer` elements.

    None where digits cannot count the result out.
    """
    whole = _as_digits(rows, outer) if all(len(row) == 1 for row in rows) else None
    if whole is None and outer == 1:
        return joined(piece for row in rows for piece in row)
    return whole


def _as_digits(rows: Sequence[Row], outer: int) -> Row | None:
    """Pieces that differ in their starts and owners alone, as one piece with digits for those."""
    first = rows[0][0]
    kinds = {(row[0].source, row[0].digits, len(row[0].owners)) for row in rows}
    if len(kinds) > 1 or first.source == ZERO:
        return None
    dims = split(first, (outer, first.size // outer))
    radixes = _radixes([row[0].start for row in rows])
    if dims is None or radixes is None:
        return None
    owner_stride = len(first.owners)
    middle: list[Digit] = []
    for size, stride in reversed(radixes):
        middle.insert(0, Digit(size, stride, owner_stride))
        owner_stride *= size
    owners = tuple(owner for row in rows for owner in row[0].owners)
    return (normal(Piece(first.source, first.start, (*dims[0], *middle, *dims[1]), owners)),)


def _radixes(numbers: Sequence[int]) -> list[tuple[int, int]] | None:
    """Sizes and strides of digits that count out these numbers; None if there are none."""
    if len(numbers) == 1:
        return []
    stride = numbers[1] - numbers[0]
    size = 1
    while size < len(numbers) and numbers[size] == numbers[0] + size * stride:
        size += 1
    blocks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    offsets = {tuple(number - block[0] for number in block) for block in blocks}
    outer = _radixes([block[0] for block in blocks]) if len(offsets) == 1 else None
    return None if outer is None else [*outer, (size, stride)]
