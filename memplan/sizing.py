"""The largest sizes whose step fits: traces say where to look, the compiler decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from memplan import pipeline
from memplan.candidates import Candidate
from memplan.errors import SizeError
from memplan.pipeline import Request
from memplan.planning.budget import parse_bytes
from memplan.planning.frontier import last_fitting
from memplan.refining import Notify
from memplan.report.frontier import Frontier, Size, Tried
from memplan.search import Search
from memplan.summary import versions

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
class _Sizing:
    make: Make
    request: Request
    budget: int
    donate: tuple[int, ...] | None
    notify: Notify
    searches: dict[Size, Search] = field(default_factory=dict)
    tried: dict[Size, Tried] = field(default_factory=dict)

    def search(self, size: Size) -> Search:
        """For the step of this size; traced once."""
        if size not in self.searches:
            self.notify(f"tracing {_spelled(size)}", None)
            self.searches[size] = self._traced(size)
        return self.searches[size]

    def _traced(self, size: Size) -> Search:
        try:
            step, args = self.make(*size)
        except Exception as error:
            error.add_note(f"while making the step of size {_spelled(size)}")
            raise
        if hasattr(step, "plan"):
            raise SizeError("the step is planned by memplan.jit already: return the plain one, which is then planned.")
        donated = self.donate if self.donate is not None else (0,) if len(args) > 1 else ()
        return pipeline.search_for(step, args, {}, {"donate_argnums": donated}, self.request, self.notify)

    def trial(self, size: Size, thorough: bool) -> Tried:
        """Compile for this size until something fits, or nothing that is likely to does; all there is, if thorough."""
        known = self.tried.get(size)
        if known and (known.fits or known.thorough or not thorough):
            return known
        search, seen = self.search(size), list[Candidate]()
        for candidate in chain(search.likely(), search.by_memory() if thorough else ()):
            seen.append(candidate)
            if search.fits(candidate):
                break
        best = seen[-1] if search.fits(seen[-1]) else min(seen, key=lambda one: one.device_bytes)
        self.tried[size] = Tried(
            size=size,
            fits=search.fits(best),
            device_bytes=best.device_bytes,
            host_bytes=best.host_bytes,
            way=best.name,
            floor_bytes=search.lowest.nbytes,
            operation=search.lowest.where,
            thorough=thorough,
            compilations=len({id(candidate) for candidate in (*seen, search.compiling.plain.compiled) if candidate}),
        )
        return self.tried[size]

    def last(self, sizes: Sequence[Size]) -> int:
        """Position of the last of these, which rise, that fits; -1 for none."""

        def trial(position: int, thorough: bool) -> tuple[bool, int]:
            self.notify(f"trying {_spelled(sizes[position])}", None)
            found = self.trial(sizes[position], thorough)
            return found.fits, found.device_bytes

        return last_fitting(
            len(sizes),
            self.budget,
            lambda position: self.search(sizes[position]).lowest.nbytes,
            lambda position: self.search(sizes[position]).least_proposed.timeline.peak_nbytes,
            trial,
        )

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
    budget = parse_bytes(request.budget, target.device.memory_bytes)
    sizing = _Sizing(make, request, budget, donate, notify)
    edges = list(sizing.edges(axes))
    if not edges:
        smallest = tuple(axis.low for axis in axes)
        search = sizing.search(smallest)
        raise search.infeasible(sizing.trial(smallest, thorough=True).device_bytes)
    return Frontier(
        axes=tuple(axis.name for axis in axes),
        largest=tuple(fits for fits, _ in edges),
        refused=tuple(refused for _, refused in edges),
        tried=tuple(sizing.tried.values()),
        traced=len(sizing.searches),
        device=target.device.name,
        budget_bytes=budget,
        host_budget_bytes=pipeline.host_budget_of(request, target),
        versions=versions(),
    )


def _spelled(size: Size) -> str:
    return " x ".join(map(str, size))
