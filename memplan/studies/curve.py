"""Plans one step for many budgets.

memplan's points are predicted: the step is explored within each budget, and XLA schedules a program
of it once for all of them. Only XLA's own rematerialization, which starts after that, must be
compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memplan import pipeline
from memplan.compilation.compiler import Modules
from memplan.compilation.deadline import Deadline, DeadlinePassed
from memplan.compilation.outcome import Explored
from memplan.errors import BudgetError
from memplan.pipeline import Notify
from memplan.planning.floor import floor
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve, Point
from memplan.request import Request, traced
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS, Baseline, Baselines, policies, refusal
from memplan.studies.ended import returned, rows_until_ended

_SMALLEST = 1.02  # The smallest budget over the floor, a lower bound that few plans reach.
_NOTHING = "nothing that fits was found"


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

    Raises:
      Interrupted: Ctrl-C ended it; it has the points that are done.
    """
    deadline = Deadline(request.time_limit)

    modules: Modules = {}

    def explored(budget: int, notify: Notify) -> Explored:
        """Compiled only if the prediction leaves open whether it fits.

        Raises:
          DeadlinePassed: the time limit has passed before all programs were explored.
        """
        within = replace(request, budget=budget)
        exploration = pipeline.explore(program, within, notify, modules, deadline=deadline)
        if exploration.ended_by:
            raise DeadlinePassed
        best = exploration.best
        is_known = best.limits.allow(best.device_bytes, best.host_bytes) or not best.fits
        return best if is_known else exploration.commit()

    target = request.target
    baselines = Baselines(step, args, options, target)
    notify("compiling the unmodified step", None)
    plain = baselines.plain()
    program = traced(step, args, {}, options, request)
    unplanned = pipeline.explore(program, request.unlimited, notify, modules).best
    nbytes, _ = floor(unplanned.planned.plain.problem)
    floor_bytes = plain.resident_bytes + nbytes
    budgets = _budgets(shares, floor_bytes, plain.device_bytes)

    def points() -> Iterator[Point]:
        yield _point("plain jax", None, plain, fits=True)
        for name, policy in policies().items():
            deadline.check()
            notify(name, None)
            yield _baseline_point(name, None, partial(baselines.checkpoint, policy))
        xla_fits = target.backend.rematerializes
        for number, budget in enumerate(reversed(budgets)):
            stage, share = f"budget {number + 1} of {len(budgets)}", number / len(budgets)
            deadline.check()
            outcome = explored(budget, _within(stage, share, notify))
            yield _point(MEMPLAN, budget, outcome, outcome.fits)
            if xla_fits:
                # Where XLA exceeds a budget, it exceeds all smaller ones, as did ten steps of the
                # bench at four budgets each: ResNet-50 took 4.2, 4.8 and 5.1 GiB for 2.9, 2.0 and
                # 1.4 on a V100.
                notify(f"{stage}: {XLA}", share)
                compiled = partial(baselines.xla, plain.resident_bytes, budget)
                point = _baseline_point(XLA, budget, compiled)
                xla_fits = point.note != _NOTHING
                yield point
            elif target.backend.rematerializes:
                yield Point(XLA, budget, None, None, None, _NOTHING)
            yield Point(BOUND, budget, budget, 0, outcome.planned.bound_s, measured="predicted")

    done, ended_by = rows_until_ended(points())
    result = Curve(
        tuple(_monotone(done)),
        target.device.name,
        plain.device_bytes,
        plain.step_s,
        floor_bytes,
        versions(),
        ended_by,
    )
    return returned(result, ended_by)


def _within(stage: str, share: float, notify: Notify) -> Notify:
    """Tells what is done within a stage of the study."""
    return lambda what, _: notify(f"{stage}: {what}", share)


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


def _point(method: str, budget: int | None, figures: Baseline | Explored, fits: bool) -> Point:
    if not fits:
        return Point(method, budget, None, None, None, _NOTHING)
    measured = "compiled" if figures.is_compiled else "predicted"
    sizes = figures.device_bytes, figures.host_bytes
    return Point(method, budget, *sizes, figures.step_s, measured=measured)


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
