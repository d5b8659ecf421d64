"""Plans one step for many budgets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memplan import pipeline
from memplan.errors import BudgetError
from memplan.pipeline import Notify, Outcome
from memplan.planning.floor import floor
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from memplan.request import Request, traced
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS, Baseline, Baselines, policies, refusal

_SMALLEST = 1.02  # The smallest budget over the floor, a lower bound that few plans reach.


def curve(
    step: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    request: Request,
    shares: int | Sequence[float],
    notify: Notify,
) -> Curve:
    """Plan a step for budgets below the plain step's bytes (see `api.curve`).

    `request.budget` has no effect.
    """

    def plan(budget: int | None) -> Outcome:
        return pipeline.best(step, args, {}, options, replace(request, budget=budget), notify)

    target = request.target
    baselines = Baselines(step, args, options, target)
    notify("compiling the unmodified step", None)
    plain = baselines.plain()
    program = traced(step, args, {}, options, request)
    unplanned = pipeline.best_of(program, request.unlimited, notify)
    nbytes, _ = floor(unplanned.planned.plain.problem)
    floor_bytes = plain.resident_bytes + nbytes
    budgets = _budgets(shares, floor_bytes, plain.device_bytes)

    def points() -> Iterator[Point]:
        yield _point("plain jax", None, plain, fits=True)
        for name, policy in policies().items():
            notify(f"compiling: {name}", None)
            yield _baseline_point(name, None, partial(baselines.checkpoint, policy))
        for number, budget in enumerate(reversed(budgets)):
            notify(f"budget {number + 1} of {len(budgets)}", number / len(budgets))
            outcome = plan(budget)
            yield _point(MEMPLAN, budget, outcome, outcome.fits)
            if target.backend.rematerializes:
                yield _baseline_point(
                    XLA, budget, partial(baselines.xla, plain.resident_bytes, budget)
                )
            yield Point(BOUND, budget, budget, 0, outcome.planned.bound_s)

    return Curve(
        tuple(_monotone(list(points()))),
        target.device.name,
        plain.device_bytes,
        plain.step_s,
        floor_bytes,
        versions(),
    )


def _budgets(shares: int | Sequence[float], floor: int, plain: int) -> list[int]:
    """Ascending budgets.

    Args:
      shares: their number, evenly between the floor and the plain step's bytes, or shares of the
        latter.

    Raises:
      BudgetError: a share is not above 0 and at most 1.
    """
    if not isinstance(shares, int):
        if not shares or not all(0 < share <= 1 for share in shares):
            raise BudgetError(
                "shares of the plain step's peak must be above 0 and at most 1, not "
                f"{list(shares)}."
            )
        return sorted(int(share * plain) for share in shares)
    low = min(int(_SMALLEST * floor), plain)
    return [low + (plain - low) * number // shares for number in range(shares)]


def _baseline_point(method: str, budget: int | None, compiled: Callable[[], Baseline]) -> Point:
    try:
        baseline = compiled()
    except REFUSALS as error:
        return Point(method, budget, None, None, None, refusal(error))
    return _point(method, budget, baseline, budget is None or baseline.device_bytes <= budget)


def _point(method: str, budget: int | None, figures: Baseline | Outcome, fits: bool) -> Point:
    if not fits:
        return Point(method, budget, None, None, None, "nothing that fits was found")
    return Point(method, budget, figures.device_bytes, figures.host_bytes, figures.step_s)


def _monotone(points: Sequence[Point]) -> Iterator[Point]:
    """Replace each plan by one for a smaller budget that is faster, as that also fits.

    A bound holds for its plan's module: if a smaller budget's module has faster kernels, the larger
    budget gets the smaller budget's bound.
    """
    best: dict[str, Point] = {}
    envelope: list[Point] = []
    for point in reversed(points):
        better = best.get(point.way)
        slower = point.step_s is None or (
            better is not None and (better.step_s or 0.0) < point.step_s
        )
        if better and point.budget_bytes and slower:
            nbytes = point.device_bytes if point.way == BOUND else better.device_bytes
            point = replace(better, budget_bytes=point.budget_bytes, device_bytes=nbytes, note="")
        if point.step_s is not None:
            best[point.way] = point
        envelope.append(point)
    return reversed(envelope)
