"""A planned step with a long scan, beside two levels of `jax.checkpoint` in the same bytes."""

from typing import Any

from experiments.bench.cases import Case
from experiments.bench.long_scans import revolve_trips
from experiments.bench.measures import planned
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.loops import stacked_nbytes
from memplan.request import Request


def measure(case: Case) -> Measurement:
    """The planned step, the fastest segment length that fits, and the trips of revolve."""
    (row, outcome), fitting = planned.row_of(case), list[tuple[float, int, int]]()
    for trips, make in case.facts["nested"].items():
        step, args = make()
        request = Request(planned.UNLIMITED, device=case.device)
        checkpointed = pipeline.best(step, args, {}, {"donate_argnums": 0}, request)
        if checkpointed.device_bytes <= outcome.limits.device_bytes:
            fitting.append((checkpointed.step_s, trips, checkpointed.device_bytes))
    row |= dict(
        zip(
            ("nested_step_s", "nested_trips", "nested_bytes"),
            min(fitting, default=()),
            strict=False,
        )
    )
    return planned.measurement_of(row | _trips(outcome), outcome)


def _trips(outcome: Outcome) -> dict[str, Any]:
    """The forward trips of a step, and the fewest possible with the snapshots that fit.

    Snapshots may take the budget, less the values of one trip and everything else in the step.
    """
    if outcome.unmodified is None or len(outcome.program.loops) != 1 or not outcome.fits:
        return {}
    ((loop, residuals),) = outcome.program.loops
    stacks = stacked_nbytes(loop, None)
    other_nbytes = outcome.unmodified.device_bytes - stacks + stacks // loop.trips
    snapshots = max(1, (outcome.limits.device_bytes - other_nbytes) // loop.snapshot_nbytes)
    run = loop.trips + (residuals.segmented_trips if residuals else 0)
    return {"trips_run": run, "revolve_trips": revolve_trips(loop.trips, snapshots)}
