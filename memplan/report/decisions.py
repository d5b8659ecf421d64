"""The decision about each value, and the costs of its alternatives, as rows of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memplan.report.views.table import Table, largest, shape
from memplan.units import format_bytes, format_seconds

Choice = Literal["keep", "offload", "recompute", "split"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The cost of each choice about a value, if all other decisions stay.

    Attributes:
      keep_bytes: rise of the device's peak if the value stays there between its uses; 0 if it does.
      recompute_s: seconds of the kernels that recompute it, with those of its operands that are no
        longer alive; None if that is impossible: `no_recompute` says why.
      host_s: seconds of its copies, both ways; None if it cannot be offloaded: `no_host` says why.
      host_wait_s: the part that stalls compute; 0 if compute hides the copies; None without copies,
        and in loops, where it is not known.
      no_recompute, no_host: '' if the choice is possible.
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
      source: `file:line` of the user's code that computes it, or ''.
      decision: it stays on the device, is offloaded to the host and comes back, is recomputed, or
        is computed in slabs.
      seconds: predicted time of its copies (both ways) or of its recomputation; 0 if it is kept.
      choices: the costs of this and the other choices; None for residuals of loops, for slabs, and
        where the planner has no choice.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: str
    decision: Choice
    seconds: float
    choices: Choices | None = None


@dataclass(frozen=True, slots=True)
class LeftAsWritten:
    """Values that a part of the step keeps for its gradient, and that memplan does not plan.

    Attributes:
      place: the loop, conditional or `shard_map` that makes them, with its `file:line`.
      nbytes: of the values, of all trips.
      reason: why they are not planned.
    """

    place: str
    nbytes: int
    reason: str


def left_table(values: Sequence[LeftAsWritten]) -> Table:
    """Values that are not planned, largest first; empty without any."""
    rows = tuple((format_bytes(row.nbytes), row.place, row.reason) for row in values)
    return Table("Kept as you wrote them", (">bytes", "by", "because"), rows)


def decisions_table(decisions: Sequence[Decision], limit: int) -> Table:
    """The largest values first, with the costs of each choice: bytes, seconds, stalls."""
    largest_decisions = sorted(decisions, key=lambda decision: -decision.nbytes)[:limit]
    rows = tuple(
        (
            format_bytes(decision.nbytes),
            decision.decision,
            *_costs(decision),
            shape(decision.shape, decision.dtype),
            decision.source.rpartition("/")[2],  # its folder would be too wide
            decision.name,
        )
        for decision in largest_decisions
    )
    title = largest("Decisions, and what each choice costs", len(rows), len(decisions))
    columns = (">bytes", "decision", ">keep", ">again", ">host", "shape", "source", "value")
    return Table(title, columns, rows)


def _costs(decision: Decision) -> tuple[str, str, str]:
    """To keep, to recompute, to offload: `196.0 MiB`, `419 us`, `hidden`; `-` if impossible."""
    choices = decision.choices
    if choices is None:
        seconds = format_seconds(decision.seconds) if decision.seconds else "-"
        keep_cost = "0 B" if decision.decision == "keep" else "-"
        if decision.decision == "recompute":
            return keep_cost, seconds, "-"
        return keep_cost, "-", seconds
    recompute = "-" if choices.recompute_s is None else format_seconds(choices.recompute_s)
    if choices.host_s is None:
        host = "-"
    elif choices.host_wait_s == 0:
        host = "hidden"
    else:
        host = format_seconds(
            choices.host_s if choices.host_wait_s is None else choices.host_wait_s
        )
    return format_bytes(choices.keep_bytes), recompute, host
