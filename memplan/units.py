"""Parses sizes in bytes, and formats bytes, seconds, FLOPs and places."""

import re
from collections.abc import Sequence
from fractions import Fraction

from memplan.errors import BudgetError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_SIZE = re.compile(
    r"^\s*(?P<number>\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*(?P<unit>[a-zA-Z]*|%)\s*$"
)

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_FLOPS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))

UNKNOWN = "not known"

Size = int | str | None
"""A size that `parse_bytes` accepts."""


def located(name: str, source: str) -> str:
    """A name with its `file:line`: `dot (net.py:7)`, or the name alone if the source is ''."""
    return f"{name} ({source})" if source else name


def parse_bytes(size: Size, whole: int, what: str = "budget") -> int:
    """Bytes of `16 * 2**30`, `"16GiB"`, `"80%"` (of `whole`) or None (all of `whole`).

    Args:
      what: the name of the size in errors.

    Raises:
      BudgetError: not a size, negative, or more than 100 %.

    Example:
      >>> from memplan.api import parse_bytes
      >>> parse_bytes("1.5 KiB", whole=4096), parse_bytes("75%", whole=4096)
      (1536, 3072)
    """
    help_text = (
        f'write the {what} as bytes (17179869184), with a unit ("16GiB", "500 MB"), as a share '
        '("80%"), or None'
    )
    if size is None:
        return whole
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BudgetError(
            f"{size!r} is not a {what}: it is a {type(size).__name__}. Please {help_text}."
        )
    if isinstance(size, int):
        if size < 0:
            raise BudgetError(f"the {what} is negative ({size} bytes). Please {help_text}.")
        return size
    match = _SIZE.match(size)
    if match is None:
        raise BudgetError(f"{size!r} is not a {what}. Please {help_text}.")
    number, unit = Fraction(match["number"].rstrip(".")), match["unit"].lower()
    if unit == "%":
        if number > 100:
            raise BudgetError(f"the {what} of {size} is more than 100 %. Please {help_text}.")
        return int(whole * number / 100)
    if unit not in _UNITS:
        raise BudgetError(
            f"{match['unit']!r} in the {what} {size!r} is not a unit. Please {help_text}."
        )
    return int(number * _UNITS[unit])


def show_bytes(nbytes: int) -> str:
    """Format bytes for messages, in the form of a budget: `5583.1 MiB`, `15.8 GiB`."""
    return _binary(nbytes, gib_from=10, gib_digits=1)


def format_bytes(nbytes: int | None) -> str:
    """Format bytes for tables: `1.50 GiB`, `1.5 KiB`, `5 B`."""
    return UNKNOWN if nbytes is None else _binary(nbytes, gib_from=1, gib_digits=2)


def format_seconds(seconds: float | None) -> str:
    """Format seconds with three digits: 0.0123 -> `12.3 ms`."""
    return UNKNOWN if seconds is None else _scaled(seconds, _SECONDS, "s")


def format_flops(flops: float | None) -> str:
    """Format floating-point operations with three digits: 2e12 -> `2.00 TFLOP`."""
    return UNKNOWN if flops is None else _scaled(flops, _FLOPS, "FLOP")


def _binary(nbytes: int, gib_from: int, gib_digits: int) -> str:
    """Format bytes in the largest binary unit that fits; GiB only from `gib_from` GiB."""
    for unit, minimum, digits in (("GiB", gib_from, gib_digits), ("MiB", 1, 1), ("KiB", 1, 1)):
        scale = _UNITS[unit.lower()]
        if abs(nbytes) >= minimum * scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} B"


def _scaled(value: float, units: Sequence[tuple[str, float]], base: str) -> str:
    """Format a value in the largest of these units that fits, or else in the base unit."""
    for unit, scale in units:
        if abs(value) >= scale:
            return f"{value / scale:#.3g} {unit}".replace(". ", " ")
    return f"{value:.3g} {base}"
