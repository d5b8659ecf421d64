"""A step with a long scan, planned, beside `jax.checkpoint` in two levels within the same bytes."""

from typing import Any

from experiments.bench.cases import Case
from experiments.bench.long_scans import revolve_trips
from experiments.bench.measures import planned
from experiments.bench.results import Found
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.loops import stacked_nbytes
from memplan.request import Request


def measure(case: Case) -> Found:
    """As planned, with the fastest of all lengths of a segment that fits, and the trips that revolve would run."""
    (row, found), fitting = planned.row_of(case), list[tuple[float, int, int]]()
    for trips, make in case.facts["nested"].items():
        step, args = make()
        request = Request(planned.UNLIMITED, device=case.device)
        other = pipeline.best(step, args, {}, {"donate_argnums": 0}, request)
        if other.device_bytes <= found.limits.device_bytes:
            fitting.append((other.step_s, trips, other.device_bytes))
    row |= dict(zip(("nested_step_s", "nested_trips", "nested_bytes"), min(fitting, default=()), strict=False))
    return planned.found_of(row | _trips(found), found)


def _trips(found: Outcome) -> dict[str, Any]:
    """Forward trips that run in a step, and the least with the snapshots that there is room for.

    They have the budget, less what else the step takes, and the values of one trip.
    """
    if found.unmodified is None or len(found.program.loops) != 1 or not found.fits:
        return {}
    ((loop, residuals),) = found.program.loops
    stacks = stacked_nbytes(loop, None)
    others = found.unmodified.device_bytes - stacks + stacks // loop.trips
    snapshots = max(1, (found.limits.device_bytes - others) // loop.snapshot_nbytes)
    run = loop.trips + (residuals.segmented_trips if residuals else 0)
    return {"trips_run": run, "revolve_trips": revolve_trips(loop.trips, snapshots)}
