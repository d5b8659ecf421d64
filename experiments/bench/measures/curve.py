"""A step within shares of its plain peak, beside the memory savings of jax and XLA."""

from dataclasses import asdict

from experiments.bench.cases import Case
from experiments.bench.results import Measurement
from memplan import api
from memplan.report.curve import Curve

SHARES = (0.75, 0.5, 0.35, 0.25)


def measure(case: Case) -> Measurement:
    """A row per program: method, budget if any, bytes by the compiler, seconds by the roofline."""
    step, args, donated = case.built()
    return rows_of(api.curve(step, args, points=SHARES, device=case.device, donate_argnums=donated))


def rows_of(curve: Curve) -> Measurement:
    """The first row is the plain step's."""
    return Measurement([asdict(point) for point in curve.points])
