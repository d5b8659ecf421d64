"""Which rows of an operand the rows of a result read, along one axis."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

Span = tuple[int, int]
"""Rows [low, high)."""


@dataclass(frozen=True)
class Rows:
    """Which rows of an operand are read by rows of a result: those of a window that moves on from row to row.

    Row `i` of the result reads positions `i * stride - before` up to `reach` further; row `j` of the operand lies at
    position `j * dilation`, with nothing between. So do a convolution's stride, dilation and padding say it.
    """

    stride: int = 1
    dilation: int = 1
    before: int = 0
    reach: int = 1
    via: Rows | None = None  # the rows are those of another operand, whose rows these are

    def of(self, low: int, high: int) -> Span:
        """The rows that rows [low, high) of the result read: [first, last).

        At least one: where the window lies between two rows, the next one behind it, which is not in it.
        """
        if self.via is not None:
            low, high = self.via.of(low, high)
        start, stop = self.window(low, high)
        first, last = -(-start // self.dilation), (stop - 1) // self.dilation + 1
        return first, max(last, first + 1)

    def window(self, low: int, high: int) -> Span:
        """The positions that rows [low, high) of the result (of `via`, where there is one) read."""
        start = low * self.stride - self.before
        return start, start + (high - 1 - low) * self.stride + self.reach

    @property
    def scale(self) -> Fraction:
        """Rows of the operand by rows of the result."""
        own = Fraction(self.stride, self.dilation)
        return own if self.via is None else own * self.via.scale

    def leave(self, made: int, given: int) -> bool:
        """A result of `made` rows reads others than the `given` rows of the operand: its padding."""
        low, high = self.of(0, made)
        return low < 0 or high > given

    def apart(self, made: int, given: int, parts: int) -> bool:
        """Equal parts of the result read, in the same way, equal parts of the operand, each its own alone."""
        own, mine = made // parts, given // parts
        return made * self.scale == given and not any(
            low < part * mine or high > (part + 1) * mine
            for part in range(parts)
            for low, high in [self.of(part * own, (part + 1) * own)]
        )


ALIGNED = Rows()
