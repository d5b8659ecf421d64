"""Plans one step for many budgets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan import pipeline
from memplan.errors import BudgetError
from memplan.pipeline import Notify, Outcome, Request
from memplan.planning.floor import floor
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS, Baseline, Baselines, policies, refusal

_SMALLEST = 1.02  # times the floor, a lower bound that most plans cannot reach


def curve(
    step: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    request: Request,
    shares: int | Sequence[float],
    notify: Notify,
) -> Curve:
    """Plan a step for budgets below the plain step's bytes (see `api.curve`); `request.budget` is not read."""

    def plan(budget: int | None) -> Outcome:
        return pipeline.best(step, args, {}, options, replace(request, budget=budget), notify)

    target = request.target
    ways = Baselines(step, args, options, target)
    notify("compiling the unmodified step", None)
    plain = ways.plain()
    nbytes, _ = floor(plan(2**60).planned.plain.problem)
    floor_bytes = plain.resident_bytes + nbytes
    budgets = _budgets(shares, floor_bytes, plain.device_bytes)

    def points() -> Iterator[Point]:
        yield from _unbudgeted(ways, plain, notify)
        for number, budget in enumerate(reversed(budgets)):
            notify(f"budget {number + 1} of {len(budgets)}", number / len(budgets))
            found = plan(budget)
            yield _plan_point(budget, found)
            if target.is_gpu:
                yield _xla_point(ways, plain.resident_bytes, budget)
            yield Point(BOUND, budget, budget, 0, found.planned.bound_s)

    found = tuple(_monotone(list(points())))
    return Curve(found, target.device.name, plain.device_bytes, plain.step_s, floor_bytes, versions())


def _budgets(shares: int | Sequence[float], floor: int, plain: int) -> list[int]:
    """Ascending budgets: this many, evenly between the floor and the plain step's bytes, or these shares of the latter.

    Raises BudgetError for invalid shares.
    """
    if not isinstance(shares, int):
        if not shares or not all(0 < share <= 1 for share in shares):
            raise BudgetError(f"shares of the plain step's peak must be above 0 and at most 1, not {list(shares)}.")
        return sorted(int(share * plain) for share in shares)
    low = min(int(_SMALLEST * floor), plain)
    return [low + (plain - low) * number // shares for number in range(shares)]


def _unbudgeted(ways: Baselines, plain: Baseline, notify: Notify) -> Iterator[Point]:
    """Methods without a budget."""
    yield Point("plain jax", None, plain.device_bytes, plain.host_bytes, plain.step_s)
    for name, policy in policies().items():
        notify(f"compiling: {name}", None)
        try:
            found = ways.checkpoint(policy)
        except REFUSALS as error:
            yield Point(name, None, None, None, None, refusal(error))
        else:
            yield Point(name, None, found.device_bytes, found.host_bytes, found.step_s)


def _plan_point(budget: int, found: Outcome) -> Point:
    if not found.fits:
        return Point(MEMPLAN, budget, None, None, None, "nothing that fits was found")
    return Point(MEMPLAN, budget, found.device_bytes, found.host_bytes, found.step_s)


def _xla_point(ways: Baselines, resident_bytes: int, budget: int) -> Point:
    try:
        found = ways.xla(resident_bytes, budget)
    except REFUSALS as error:
        return Point(XLA, budget, None, None, None, refusal(error))
    if found.device_bytes > budget:
        return Point(XLA, budget, None, None, None, "nothing that fits was found")
    return Point(XLA, budget, found.device_bytes, found.host_bytes, found.step_s)


def _monotone(points: Sequence[Point]) -> Iterator[Point]:
    """A plan for a smaller budget also fits a larger one, and replaces its plan if it is faster.

    A bound holds for its plan's module: if a smaller budget's module has faster kernels, the larger budget gets the
    smaller budget's bound.
    """
    best: dict[str, Point] = {}
    found: list[Point] = []
    for point in reversed(points):
        known = best.get(point.way)
        if known and point.budget_bytes and (point.step_s is None or (known.step_s or 0.0) < point.step_s):
            nbytes = point.device_bytes if point.way == BOUND else known.device_bytes
            point = replace(known, budget_bytes=point.budget_bytes, device_bytes=nbytes, note="")
        if point.step_s is not None:
            best[point.way] = point
        found.append(point)
    return reversed(found)
