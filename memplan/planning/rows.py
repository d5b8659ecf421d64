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

    Attributes:
      via: the rows are those of another operand, whose rows these are.
    """

    stride: int = 1
    dilation: int = 1
    before: int = 0
    reach: int = 1
    via: Rows | None = None

    def of(self, low: int, high: int) -> Span:
        """The rows that rows [low, high) of the result read: [first, last)."""
        if self.via is not None:
            low, high = self.via.of(low, high)
        first = -((self.before - low * self.stride) // self.dilation)
        last = ((high - 1) * self.stride - self.before + self.reach - 1) // self.dilation + 1
        return first, last

    @property
    def scale(self) -> Fraction:
        """Rows of the operand by rows of the result."""
        own = Fraction(self.stride, self.dilation)
        return own if self.via is None else own * self.via.scale

    @property
    def has_halo(self) -> bool:
        """Parts of a result read rows that other parts read too, or leave rows unread that no part reads."""
        blocks = self.before == 0 and self.reach == self.stride and self.dilation == 1
        repeated = self.stride == 1 and self.reach == self.dilation == self.before + 1
        everything = self.stride == 0
        return not (blocks or repeated or everything)


ALIGNED = Rows()
