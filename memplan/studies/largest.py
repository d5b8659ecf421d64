"""Finds the largest size whose step fits, by compilations."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from memplan import pipeline
from memplan.errors import SizeError
from memplan.pipeline import Notify, Outcome
from memplan.report.frontier import Frontier, Trial
from memplan.request import Request, limits_of
from memplan.results.infeasible import floor_of
from memplan.results.report import versions

Make = Callable[[int], tuple[Callable[..., Any], Sequence[Any]]]
"""Size -> (step, args)."""


def frontier(
    make: Make,
    name: str,
    low: int,
    high: int,
    step: int,
    donate: tuple[int, ...] | None,
    request: Request,
    notify: Notify,
) -> Frontier:
    """Find the largest size that fits (see `api.frontier`).

    A bisection finds it, since a step's memory rises with its size.

    Raises:
      InfeasibleBudgetError: the smallest size does not fit.
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
    target = request.target
    limits = limits_of(request, target)
    outcomes: dict[int, Outcome] = {}

    def fits(position: int) -> bool:
        size = sizes[position]
        notify(f"trying {size}", None)
        outcomes[size] = _compiled(make, size, donate, request, notify)
        return outcomes[size].fits

    last = last_fitting(len(sizes), fits)
    if last < 0:
        raise pipeline.infeasible_error(outcomes[low], request, notify)
    return Frontier(
        name=name,
        largest=sizes[last],
        refused=sizes[last + 1] if last + 1 < len(sizes) else None,
        tried=tuple(_trial(size, outcome) for size, outcome in outcomes.items()),
        device=target.device.name,
        budget_bytes=limits.device_bytes,
        host_budget_bytes=limits.host_bytes,
        versions=versions(),
    )


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


def _compiled(
    make: Make, size: int, donate: tuple[int, ...] | None, request: Request, notify: Notify
) -> Outcome:
    """Compile the step of this size within the budget, or else with the fewest bytes."""
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
    if donate is None:
        donate = (0,) if len(args) > 1 else ()
    return pipeline.best(step, args, {}, {"donate_argnums": donate}, request, notify)


def _trial(size: int, outcome: Outcome) -> Trial:
    floor, operation = floor_of(outcome)
    return Trial(
        size=size,
        fits=outcome.fits,
        device_bytes=outcome.device_bytes,
        host_bytes=outcome.host_bytes,
        way=outcome.method,
        floor_bytes=floor,
        operation=operation,
        compilations=outcome.compilations,
    )
