"""One step planned for many budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan import pipeline
from memplan.candidates import Candidate
from memplan.errors import BudgetError
from memplan.pipeline import Request
from memplan.planning.floor import floor
from memplan.refining import Notify
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from memplan.search import Search
from memplan.summary import versions
from memplan.ways import REFUSALS, Ways, policies, refusal

_SMALLEST = 1.02  # of the floor: what no plan can go below, most can not reach


@dataclass
class _Curving:
    """Ways that know no budget, and a search to be repeated for many."""

    ways: Ways
    search: Search

    def __post_init__(self) -> None:
        self.search.notify("compiling the unmodified step", None)
        self.plain = self.search.plain()
        self.lowest = floor(self.search.graph).nbytes

    def fixed(self) -> Iterator[Point]:
        """Ways that know no budget."""
        plain = self.plain
        yield Point("plain jax", None, plain.device_bytes, plain.host_bytes, plain.step_s)
        for name, policy in policies().items():
            self.search.notify(f"compiling: {name}", None)
            try:
                found = self.ways.checkpointed(policy)
            except REFUSALS as error:
                yield Point(name, None, None, None, None, refusal(error))
            else:
                yield Point(name, None, found.device_bytes, found.host_bytes, found.step_s)

    def budgets(self, shares: int | Sequence[float]) -> list[int]:
        """Rising: as many from the floor up to the last below what the plain step takes, evenly, or these shares of it.

        Raises BudgetError for shares that are none.
        """
        if not isinstance(shares, int):
            if not shares or not all(0 < share <= 1 for share in shares):
                raise BudgetError(f"shares of the plain step's peak lie above 0 and up to 1, not {list(shares)}.")
            return sorted(int(share * self.plain.device_bytes) for share in shares)
        count, low, high = shares, min(int(_SMALLEST * self.lowest), self.plain.device_bytes), self.plain.device_bytes
        return [low + (high - low) * number // count for number in range(count)]

    def planned(self, shares: int | Sequence[float]) -> list[Point]:
        """By falling budget. A plan for less memory counts for more, where it is the faster one."""
        points: list[Point] = []
        best: dict[str, Candidate | None] = {MEMPLAN: None, XLA: None}
        budgets = self.budgets(shares)
        for number, budget in enumerate(budgets):
            self.search.notify(f"budget {number + 1} of {len(budgets)}", number / len(budgets))
            search = replace(self.search, budget=budget, tried=[])
            found: dict[str, Callable[[], Iterable[Candidate]]] = {MEMPLAN: search.own}
            if search.target.is_gpu:
                found[XLA] = search.rematerialized
            for way, candidates in found.items():
                fitting = [*filter(search.fits, candidates()), *filter(None, (best[way],))]
                best[way] = chosen = min(fitting, key=lambda one: one.step_s or 0.0, default=None)
                points.append(_point(way, budget, chosen))
            points.append(Point(BOUND, budget, budget, 0, search.least_s))
        return points[::-1]


def _point(way: str, budget: int, chosen: Candidate | None) -> Point:
    if chosen is None:
        return Point(way, budget, None, None, None, "nothing that fits was found")
    return Point(way, budget, chosen.device_bytes, chosen.host_bytes, chosen.step_s)


def curve(
    step: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    request: Request,
    shares: int | Sequence[float],
    notify: Notify,
) -> Curve:
    """Plan a step for budgets below what it takes as it is (see `api.curve`); `request.budget` is not read."""
    search = pipeline.search_for(step, args, {}, options, replace(request, budget=None), notify)
    curving = _Curving(Ways(step, args, options, search.target), search)
    points = (*curving.fixed(), *curving.planned(shares))
    plain = curving.plain
    return Curve(points, search.target.device.name, plain.device_bytes, plain.step_s, curving.lowest, versions())
