"""A step for shares of its plain peak, beside what jax and XLA do about memory without a plan."""

from dataclasses import asdict

from experiments.bench.cases import Case
from experiments.bench.results import Found
from memplan import api
from memplan.report.curve import Curve

SHARES = (0.75, 0.5, 0.35, 0.25)


def measure(case: Case) -> Found:
    """A row for each program: its way, its budget where it has one, bytes by the compiler, seconds by the roofline."""
    step, args, donated = case.built()
    return rows_of(api.curve(step, args, points=SHARES, device=case.device, donate_argnums=donated))


def rows_of(curve: Curve) -> Found:
    """The first row is the plain step's."""
    return Found([asdict(point) for point in curve.points])
