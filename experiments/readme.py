"""Tables of measured results, kept in the README beside them."""

from __future__ import annotations

BEGIN, END = "<!-- tables -->\n", "<!-- end -->\n"


def inserted(text: str, new: str) -> str:
    """`text` with what stands between the two marks replaced.

    Raises:
      ValueError: it lacks a mark.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the README lacks {BEGIN.strip()} or {END.strip()}; put the two lines back.")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"
