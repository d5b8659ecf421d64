"""Finds the largest size whose step fits, by explorations; only that size is compiled."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from memplan import pipeline
from memplan.compilation.deadline import CTRL_C, TIME_LIMIT, Deadline, DeadlinePassed
from memplan.compilation.outcome import Explored, Outcome
from memplan.errors import SizeError
from memplan.pipeline import Exploration, Notify
from memplan.report.frontier import Frontier, Trial
from memplan.request import Request, limits_of, traced
from memplan.results.infeasible import floor_of, out_of_time
from memplan.results.report import versions
from memplan.studies.ended import returned

Make = Callable[[int], tuple[Callable[..., Any], Sequence[Any]]]
"""Size -> (step, args)."""


def frontier(
    make: Make,
    name: str,
    low: int,
    high: int,
    step: int,
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Frontier:
    """Find the largest size that fits (see `api.frontier`).

    A bisection finds it, since a step's memory rises with its size. If the compiled step exceeds
    its prediction, the sizes below are searched.

    Raises:
      InfeasibleBudgetError: the smallest size does not fit.
      Interrupted: Ctrl-C ended the search after a size that fits; it has the sizes tried.
      TimeLimitError: the time limit has passed, and no size that fits was found.
      SizeError: there is no size, or the step is already planned.
    """
    if (
        not all(isinstance(bound, Integral) for bound in (low, high, step))
        or step < 1
        or low > high
    ):
        raise SizeError(
            f"{name} from {low} to {high} in steps of {step} is not a range of sizes. low, high "
            "and step must be integers, low at most high, step at least 1. For two sizes, search "
            "one for each value of the other."
        )
    sizes = range(low, high + 1, step)
    deadline = Deadline(request.time_limit)
    target = request.target
    limits = limits_of(request, target)
    explored: dict[int, Exploration] = {}
    outcomes: dict[int, Outcome] = {}
    tried: dict[int, Trial] = {}

    @functools.cache
    def fits(position: int) -> bool:
        if explored:
            deadline.check()
        size = sizes[position]
        exploration = _explored(make, name, size, options, request, notify, deadline)
        explored[size] = exploration
        if exploration.ended_by and not exploration.best.fits:
            raise DeadlinePassed  # nobody knows whether it fits
        tried[size] = _trial(size, exploration.best, exploration.explorations)
        return exploration.best.fits

    def fits_compiled(position: int) -> bool:
        size = sizes[position]
        outcome = outcomes[size] = explored[size].commit()
        tried[size] = _trial(size, outcome, outcome.explorations, outcome.compilations)
        return outcome.fits

    last, ended_by = -1, ""
    try:
        last = last_compiled(len(sizes), fits, fits_compiled)
    except (DeadlinePassed, KeyboardInterrupt) as end:
        ended_by = CTRL_C if isinstance(end, KeyboardInterrupt) else TIME_LIMIT
        fitting = [size for size, trial in tried.items() if trial.fits]
        if not fitting and ended_by == CTRL_C:
            raise
        last = sizes.index(max(fitting)) if fitting else -1
    if last < 0:
        smallest = min(explored)
        exploration = explored[smallest]
        if ended_by:
            programs = sum(each.explorations for each in explored.values())
            raise out_of_time(exploration.best, programs, request.time_limit)
        refused = replace(exploration, best=outcomes.get(smallest, exploration.best))
        raise pipeline.refusal(refused, request, notify, deadline)
    has_refused = not ended_by and last + 1 < len(sizes)
    result = Frontier(
        name=name,
        largest=sizes[last],
        refused=sizes[last + 1] if has_refused else None,
        tried=tuple(tried.values()),
        device=target.device.name,
        budget_bytes=limits.device_bytes,
        host_budget_bytes=limits.host_bytes,
        versions=versions(),
        ended_by=ended_by,
    )
    return returned(result, ended_by)


def last_fitting(count: int, fits: Callable[[int], bool]) -> int:
    """The last of the positions 0 .. count - 1 that fits; -1 if none fits.

    All positions before it must fit. `fits` has been called for this position and for the next one.
    """
    below = -1
    above = count
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle):
            below = middle
        else:
            above = middle
    return below


def last_compiled(
    count: int, fits: Callable[[int], bool], fits_compiled: Callable[[int], bool]
) -> int:
    """The last position that fits by prediction, and compiled; -1 if none does (`last_fitting`)."""
    last = last_fitting(count, fits)
    while last >= 0 and not fits_compiled(last):
        last = last_fitting(last, fits)
    return last


def _explored(
    make: Make,
    name: str,
    size: int,
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
    deadline: Deadline,
) -> Exploration:
    """Explore the step of this size until a program fits the budget."""

    def tell(stage: str, share: float | None) -> None:
        notify(f"{name} {size}: {stage}", share)

    tell("making the step", None)
    try:
        step, args = make(size)
    except Exception as error:
        error.add_note(f"while making the step of size {size}")
        raise
    if hasattr(step, "plan"):
        raise SizeError(
            "the step is already planned by memplan.jit; return the plain step, which largest "
            "plans itself."
        )
    donated = {"donate_argnums": (0,) if len(args) > 1 else ()}
    program = traced(step, args, {}, {**donated, **options}, request, tell)
    return pipeline.explore(program, request, tell, {}, any_that_fits=True, deadline=deadline)


def _trial(size: int, explored: Explored, explorations: int, compilations: int = 0) -> Trial:
    floor, operation = floor_of(explored)
    return Trial(
        size=size,
        fits=explored.fits,
        device_bytes=explored.device_bytes,
        host_bytes=explored.host_bytes,
        way=explored.method,
        floor_bytes=floor,
        operation=operation,
        compilations=compilations,
        explorations=explorations,
        step_s=explored.step_s,
        unmodified_step_s=explored.unmodified.replay.step_s if explored.unmodified else None,
    )
