"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from memplan.errors import BudgetError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_SIZE = re.compile(r"^\s*(?P<number>\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*(?P<unit>[a-zA-Z]*|%)\s*$")

Size = int | str | None


def parse_bytes(size: Size, whole: int, what: str = "budget") -> int:
    """Bytes of `16 * 2**30`, `"16GiB"`, `"80%"` (of `whole`) or None (all of `whole`).

    Raises:
      BudgetError: not a size, negative, or more than 100 %.
    """
    help_text = f'write the {what} as bytes (17179869184), with a unit ("16GiB", "500 MB"), as a share ("80%"), or None'
    if size is None:
        return whole
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BudgetError(f"{size!r} is not a {what}: it is a {type(size).__name__}. Please {help_text}.")
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
            raise BudgetError(f"the {what} of {size} is more than there is. Please {help_text}.")
        return int(whole * number / 100)
    if unit not in _UNITS:
        raise BudgetError(f"{match['unit']!r} in the {what} {size!r} is not a unit. Please {help_text}.")
    return int(number * _UNITS[unit])


def show_bytes(nbytes: int) -> str:
    """`5583.1 MiB`, `15.8 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= (10 if unit == "GiB" else 1) * factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
