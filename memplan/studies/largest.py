"""The largest sizes whose step fits: the compiler decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan import pipeline
from memplan.errors import SizeError
from memplan.outcome.infeasible import floor_of, infeasible
from memplan.outcome.summary import versions
from memplan.pipeline import Notify, Outcome, Request
from memplan.report.frontier import Frontier, Size, Trial
from memplan.studies.bisect import last_fitting

Make = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]
"""Sizes -> (step, args)."""

Bounds = int | Sequence[int]


@dataclass(frozen=True)
class Axis:
    """Sizes that are looked at: low, low + step, ... up to high.

    Raises SizeError where there is none.
    """

    name: str
    low: int
    high: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1 or self.low > self.high:
            raise SizeError(
                f"{self.name} from {self.low} to {self.high} in steps of {self.step} is no range of sizes. Let low be "
                "at most high and the step at least 1."
            )

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1, self.step)


def axes_of(low: Bounds, high: Bounds, step: Bounds, names: Sequence[str]) -> list[Axis]:
    """One axis or two; a single bound is that of both.

    Raises SizeError where the bounds make none.
    """
    limits = [bounds if isinstance(bounds, Sequence) else (bounds,) for bounds in (low, high, step)]
    count = max(map(len, limits))
    limits = [tuple(bounds) * count if len(bounds) == 1 else bounds for bounds in limits]
    names = names or (("size",) if count == 1 else ("first", "second"))
    if count > 2 or len({len(names), *map(len, limits)}) > 1:
        raise SizeError(
            f"low={low}, high={high}, step={step} and names={tuple(names)} are not one axis or two. Give a number "
            "for each, or a pair; what else the step depends on is for `make` to know."
        )
    return [Axis(name, *bounds) for name, *bounds in zip(names, *limits, strict=True)]


@dataclass
class _Search:
    """Outcomes of the sizes looked at so far."""

    make: Make
    request: Request
    donate: tuple[int, ...] | None
    notify: Notify
    outcomes: dict[Size, Outcome] = field(default_factory=dict)

    def outcome(self, size: Size) -> Outcome:
        """The step of this size, compiled so that it fits, or takes the least; once."""
        if size not in self.outcomes:
            self.notify(f"trying {_text(size)}", None)
            self.outcomes[size] = self._compile(size)
        return self.outcomes[size]

    def _compile(self, size: Size) -> Outcome:
        try:
            step, args = self.make(*size)
        except Exception as error:
            error.add_note(f"while making the step of size {_text(size)}")
            raise
        if hasattr(step, "plan"):
            raise SizeError("the step is planned by memplan.jit already: return the plain one, which is then planned.")
        donate = self.donate if self.donate is not None else (0,) if len(args) > 1 else ()
        return pipeline.best(step, args, {}, {"donate_argnums": donate}, self.request, self.notify)

    def trials(self) -> Iterator[Trial]:
        for size, found in self.outcomes.items():
            floor, operation = floor_of(found)
            yield Trial(
                size=size,
                fits=found.fits,
                device_bytes=found.device_bytes,
                host_bytes=found.host_bytes,
                way=found.way,
                floor_bytes=floor,
                operation=operation,
                compilations=found.compilations,
            )

    def last(self, sizes: Sequence[Size]) -> int:
        """Position of the last of these, which rise, that fits; -1 for none."""
        return last_fitting(len(sizes), lambda position: self.outcome(sizes[position]).fits)

    def rows(self, axes: Sequence[Axis]) -> Iterator[list[Size]]:
        """Sizes along the last axis, one row for each of the first."""
        *_, last = axes
        for first in axes[0].sizes if len(axes) > 1 else (None,):
            yield [(size,) if first is None else (first, size) for size in last.sizes]

    def edges(self, axes: Sequence[Axis]) -> Iterator[tuple[Size, Size]]:
        """Each row's largest size that fits, and the next one; no row has a larger one than those before it."""
        left = len(axes[-1].sizes)
        for row in self.rows(axes):
            found = self.last(row[:left])
            if found < 0:
                return
            left = found + 1
            yield row[found], row[found + 1] if found + 1 < len(row) else ()


def frontier(
    make: Make, axes: Sequence[Axis], donate: tuple[int, ...] | None, request: Request, notify: Notify
) -> Frontier:
    """Find the largest sizes along one or two axes (see `api.frontier`).

    Raises:
      InfeasibleBudgetError: the smallest size does not fit.
      SizeError: the step cannot be planned again.
    """
    target = pipeline.target_of(request.device)
    limits = pipeline.limits_of(request, target)
    search = _Search(make, request, donate, notify)
    edges = list(search.edges(axes))
    if not edges:
        raise infeasible(search.outcome(tuple(axis.low for axis in axes)), request.splits)
    return Frontier(
        axes=tuple(axis.name for axis in axes),
        largest=tuple(fits for fits, _ in edges),
        refused=tuple(refused for _, refused in edges),
        tried=tuple(search.trials()),
        traced=len(search.outcomes),
        device=target.device.name,
        budget_bytes=limits.device_bytes,
        host_budget_bytes=limits.host_bytes,
        versions=versions(),
    )


def _text(size: Size) -> str:
    return " x ".join(map(str, size))
