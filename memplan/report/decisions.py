"""What becomes of each value, and what the other choices about it would cost, as rows of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memplan.report.views.table import Table, largest, shape
from memplan.units import format_bytes, format_seconds

Choice = Literal["keep", "offload", "recompute", "split"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What each choice about a value costs if all other decisions stay; of the choice that was made, its own costs.

    Attributes:
      keep_bytes: by which the device's peak rises if it stays there between its uses; 0 if it does.
      recompute_s: seconds of the kernels that compute it again, with those of its operands that have gone by then; None
        if that cannot be: `no_recompute` says why.
      host_s: seconds of its copies, both ways; None if it cannot go to the host: `no_host` says why.
      host_wait_s: of a step, that kernels wait for these copies; 0 if they are hidden; None without copies, and in
        loops, where it is not known.
      no_recompute, no_host: '' where the choice is possible.
    """

    keep_bytes: int
    recompute_s: float | None
    host_s: float | None
    host_wait_s: float | None
    no_recompute: str = ""
    no_host: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one value, from its definition to its last use.

    Attributes:
      name: as in the graph.
      shape, dtype: of the array.
      nbytes: bytes on the device.
      source: `file:line` of the user's code that makes it, or ''.
      decision: it stays on the device, is offloaded to the host and comes back, is recomputed, or is computed in slabs.
      seconds: predicted time of its copies (both ways) or of its recomputation; 0 if it is kept.
      choices: the costs of this choice beside those of the others; None for residuals of loops, for slabs, and where
        the planner has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: str
    decision: Choice
    seconds: float
    choices: Choices | None = None


def decisions_table(decisions: Sequence[Decision], limit: int) -> Table:
    """The largest first, with what each choice costs: bytes at the peak, seconds, seconds that kernels wait."""
    shown = sorted(decisions, key=lambda one: -one.nbytes)[:limit]
    rows = tuple(
        (
            format_bytes(one.nbytes),
            one.decision,
            *_costs(one),
            shape(one.shape, one.dtype),
            one.source.rpartition("/")[2],  # there is no room for its folder
            one.name,
        )
        for one in shown
    )
    title = largest("Decisions, and what each choice costs", len(rows), len(decisions))
    return Table(title, (">bytes", "decision", ">keep", ">again", ">host", "shape", "source", "value"), rows)


def _costs(decision: Decision) -> tuple[str, str, str]:
    """To keep, to recompute, on the host: `196.0 MiB`, `419 us`, `hidden`; `-` where a choice is not possible."""
    known = decision.choices
    if known is None:
        taken = format_seconds(decision.seconds) if decision.seconds else "-"
        kept = "0 B" if decision.decision == "keep" else "-"
        return (kept, taken, "-") if decision.decision == "recompute" else (kept, "-", taken)
    recompute = "-" if known.recompute_s is None else format_seconds(known.recompute_s)
    if known.host_s is None:
        host = "-"
    elif known.host_wait_s == 0:
        host = "hidden"
    else:
        host = format_seconds(known.host_s if known.host_wait_s is None else known.host_wait_s)
    return format_bytes(known.keep_bytes), recompute, host
