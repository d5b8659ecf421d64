"""Pieces of arrays: elements of one source in an order that a few digits count out, each summed over some devices."""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ZERO = -1  # the source of zeros


class Digit(NamedTuple):
    """One digit of a piece's index, the first varying slowest.

    Attributes:
      size: how many values it has.
      step: how far the next one is in the source, in elements.
      turn: how far the next one is in the piece's list of owners.
    """

    size: int
    step: int
    turn: int


class Piece(NamedTuple):
    """Elements of a source, in order.

    Attributes:
      source: the number of the source, or `ZERO`.
      start: the place of the first element in the source, in row-major order.
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
    """The same piece in its one notation: no digit of size 1, none that two could be, owners in the digits' order."""
    if piece.source == ZERO:
        return zeros(piece.size)
    digits = [digit for digit in piece.digits if digit.size > 1]
    if len(piece.owners) > 1:
        digits, owners = _in_order(digits, piece.owners)
    else:
        owners = piece.owners
        digits = [Digit(size, step, 0) for size, step, _ in digits]
    found: list[Digit] = []
    for digit in digits:
        before = found[-1] if found else None
        if before and (before.step, before.turn) == (digit.size * digit.step, digit.size * digit.turn):
            found[-1] = digit._replace(size=before.size * digit.size)
        else:
            found.append(digit)
    return Piece(piece.source, piece.start, tuple(found), owners)


def _in_order(digits: Sequence[Digit], owners: Sequence[int]) -> tuple[list[Digit], tuple[int, ...]]:
    """Digits and owners, where the owners vary with the digits that they follow, the last fastest, and no others."""
    turning = [number for number, digit in enumerate(digits) if digit.turn]
    for number in tuple(turning):
        others = [range(digits[other].size) for other in turning if other != number]
        turns = [digits[other].turn for other in turning if other != number]
        starts = [sum(at * turn for at, turn in zip(place, turns, strict=True)) for place in itertools.product(*others)]
        size, _, turn = digits[number]
        if all(len({owners[start + at * turn] for at in range(size)}) == 1 for start in starts):
            turning.remove(number)
    places = itertools.product(*(range(digits[number].size) for number in turning))
    listed = tuple(
        owners[sum(at * digits[number].turn for at, number in zip(place, turning, strict=True))] for place in places
    )
    found, turn = [digit._replace(turn=0) for digit in digits], 1
    for number in reversed(turning):
        found[number] = found[number]._replace(turn=turn)
        turn *= found[number].size
    return found, listed


def joined(pieces: Iterable[Piece]) -> Row:
    """Pieces one behind the other; neighbours that are neighbours in their source are one piece."""
    found: list[Piece] = []
    for piece in pieces:
        if found and (both := _both(found[-1], piece)) is not None:
            found[-1] = both
        else:
            found.append(piece)
    return tuple(found)


def _both(first: Piece, second: Piece) -> Piece | None:
    if first.source != second.source or first.owners != second.owners or len(first.owners) > 1:
        return None
    if first.source == ZERO:
        return zeros(first.size + second.size)
    step, rest = 1, ()
    for piece in (first, second):
        if piece.digits:
            step, rest = piece.digits[0].step, piece.digits[1:]
    sizes = [_along(piece, step, rest) for piece in (first, second)]
    if 0 in sizes or second.start != first.start + sizes[0] * step:
        return None
    return normal(Piece(first.source, first.start, (Digit(sum(sizes), step, 0), *rest), first.owners))


def _along(piece: Piece, step: int, rest: tuple[Digit, ...]) -> int:
    """The size of the first digit of a piece that has this step, before the rest; 0 if there is none."""
    if piece.digits == rest:
        return 1
    is_along = bool(piece.digits) and piece.digits[0].step == step and piece.digits[1:] == rest
    return piece.digits[0].size if is_along else 0


def cut(piece: Piece, low: int, high: int) -> list[Piece]:
    """The elements from one place of a piece to another."""
    if (found := _between(piece.digits, low, high)) is not None:
        return [_moved(piece, found)]
    first, rest = piece.digits[0], piece.digits[1:]
    inner = count(rest)
    at = low // inner
    if at == (high - 1) // inner:
        there = _moved(piece, (at * first.step, at * first.turn, rest))
        return cut(there, low - at * inner, high - at * inner)
    marks = sorted({low, -(-low // inner) * inner, high // inner * inner, high})
    return [one for start, end in itertools.pairwise(marks) for one in cut(piece, start, end)]


def cut_row(row: Row, low: int, high: int) -> Row:
    """The elements from one place of a row to another."""
    marks = ends(row)
    found: list[Piece] = []
    for number in range(bisect.bisect_right(marks, low) - 1, bisect.bisect_left(marks, high)):
        before, after = marks[number], marks[number + 1]
        found += cut(row[number], max(low, before) - before, min(high, after) - before)
    return joined(found)


def cut_at(row: Row, marks: Iterable[int]) -> list[Piece]:
    """The row in pieces of which each ends at one of these places or where one ended before."""
    return [piece for low, high in itertools.pairwise(marks) for piece in cut_row(row, low, high)]


def ends(row: Row) -> list[int]:
    return [0, *itertools.accumulate(piece.size for piece in row)]


_Range = tuple[int, int, tuple[Digit, ...]]  # how far into the source and the owners, and digits


def _moved(piece: Piece, to: _Range) -> Piece:
    step, turn, digits = to
    return normal(Piece(piece.source, piece.start + step, digits, piece.owners[turn:]))


def _between(digits: tuple[Digit, ...], low: int, high: int) -> _Range | None:
    """The values of an index from one place to another, if digits can count them out."""
    if not digits:
        return 0, 0, ()
    first, rest = digits[0], digits[1:]
    inner = count(rest)
    at = low // inner
    if low % inner == 0 and high % inner == 0:
        return at * first.step, at * first.turn, (first._replace(size=(high - low) // inner), *rest)
    if at != (high - 1) // inner or (found := _between(rest, low - at * inner, high - at * inner)) is None:
        return None
    return at * first.step + found[0], at * first.turn + found[1], found[2]


def split(piece: Piece, sizes: Sequence[int]) -> list[tuple[Digit, ...]] | None:
    """The digits of each dimension of an array that is one piece; None where they do not follow its dimensions."""
    left, found = list(piece.digits), list[tuple[Digit, ...]]()
    for size in reversed(sizes):
        part: list[Digit] = []
        while size > 1:
            digit = left.pop()
            if size % digit.size and digit.size % size:
                return None
            if digit.size > size:
                left.append(Digit(digit.size // size, digit.step * size, digit.turn * size))
                digit = digit._replace(size=size)
            part.insert(0, digit)
            size //= digit.size
        found.insert(0, tuple(part))
    return found


def narrowed(row: Row, sizes: tuple[int, int, int], low: int, high: int) -> Row | None:
    """A range of the middle one of three dimensions; None where digits cannot count it out."""
    outer, _, inner = sizes
    if outer == 1:
        return cut_row(row, low * inner, high * inner)
    if len(row) != 1 or (parts := split(row[0], sizes)) is None or (found := _between(parts[1], low, high)) is None:
        return None
    step, turn, digits = found
    return (_moved(row[0], (step, turn, (*parts[0], *digits, *parts[2]))),)


def turned(row: Row, dims: Sequence[int], order: Sequence[int]) -> Row | None:
    """A transposed array; None where digits cannot count it out."""
    moving = [dim for dim in order if dims[dim] > 1]
    if moving == sorted(moving):
        return row
    if len(row) != 1 or (parts := split(row[0], dims)) is None:
        return None
    return (normal(row[0]._replace(digits=tuple(digit for dim in order for digit in parts[dim]))),)


def stacked(rows: Sequence[Row], outer: int) -> Row | None:
    """Arrays one beside the other along a dimension behind `outer` elements; None where digits cannot count it out."""
    whole = _as_digit(rows, outer) if all(len(row) == 1 for row in rows) else None
    if whole is None and outer == 1:
        return joined(piece for row in rows for piece in row)
    return whole


def _as_digit(rows: Sequence[Row], outer: int) -> Row | None:
    """Pieces that differ in their starts and owners alone, as a piece that has digits for its place among them."""
    first = rows[0][0]
    if len({(row[0].source, row[0].digits, len(row[0].owners)) for row in rows}) > 1 or first.source == ZERO:
        return None
    parts = split(first, (outer, first.size // outer))
    places = _counted([row[0].start for row in rows])
    if parts is None or places is None:
        return None
    turn, middle = len(first.owners), list[Digit]()
    for size, step in reversed(places):
        middle.insert(0, Digit(size, step, turn))
        turn *= size
    owners = tuple(one for row in rows for one in row[0].owners)
    return (normal(Piece(first.source, first.start, (*parts[0], *middle, *parts[1]), owners)),)


def _counted(numbers: Sequence[int]) -> list[tuple[int, int]] | None:
    """Sizes and steps of digits that count out these numbers; None if there are none."""
    if len(numbers) == 1:
        return []
    step, size = numbers[1] - numbers[0], 1
    while size < len(numbers) and numbers[size] == numbers[0] + size * step:
        size += 1
    blocks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    if any([one - block[0] for one in block] != [one - numbers[0] for one in blocks[0]] for block in blocks):
        return None
    outer = _counted([block[0] for block in blocks])
    return None if outer is None else [*outer, (size, step)]
