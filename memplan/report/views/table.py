"""Tables before anyone draws them, and how a figure is written. `text` and `html` are the two that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN = "not known"

_BINARY = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_FLOPS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text.

    Attributes:
      title: above it; '' for none.
      columns: headings; a leading '>' sets the column flush right.
      rows: each as long as `columns`.
      emphasis: what draws the eye in each row: `good`, `bad` or ''; empty for no emphasis at all.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: tuple[str, ...] = ()

    def tone(self, row: int) -> str:
        return self.emphasis[row] if self.emphasis else ""


def heading(column: str) -> tuple[str, bool]:
    """The heading without its mark, and whether the column is set flush right."""
    return column.removeprefix(">"), column.startswith(">")


def size(nbytes: int | None) -> str:
    """Bytes in binary units: 1536 -> `1.5 KiB`, 5 -> `5 B`."""
    if nbytes is None:
        return UNKNOWN
    for unit, scale in _BINARY:
        if abs(nbytes) >= scale:
            digits = 2 if unit == "GiB" else 1
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} B"


def seconds(value: float | None) -> str:
    """Seconds with three digits: 0.0123 -> `12.3 ms`."""
    return UNKNOWN if value is None else _scaled(value, _SECONDS, "s")


def flops(value: float | None) -> str:
    """Floating-point operations with three digits: 2e12 -> `2.00 TFLOP`."""
    return UNKNOWN if value is None else _scaled(value, _FLOPS, "FLOP")


def shape(sides: Sequence[int], dtype: str) -> str:
    """`float32[64,112,112]`."""
    return f"{dtype}[{','.join(str(side) for side in sides)}]"


def short_source(source: str, parts: int = 2) -> str:
    """The last folders of a long `file:line`."""
    pieces = source.split("/")
    return source if len(pieces) <= parts + 1 else "../" + "/".join(pieces[-parts:])


def largest(title: str, shown: int, total: int) -> str:
    """A title that owns up to rows left out."""
    return f"{title} ({total})" if shown == total else f"{title} (the largest {shown} of {total})"


def _scaled(value: float, units: Sequence[tuple[str, float]], base: str) -> str:
    for unit, scale in units:
        if abs(value) >= scale:
            return f"{value / scale:#.3g} {unit}".replace(". ", " ")
    return f"{value:.3g} {base}"
