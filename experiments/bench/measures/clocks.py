"""One step planned by two clocks, at the peak rates and by class; both clocks time both plans."""

import tempfile
from dataclasses import replace
from pathlib import Path

from experiments.bench.cases import Case
from experiments.bench.measures.planned import limit_of
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.hardware.device import Device
from memplan.hardware.efficiency import PEAK
from memplan.hardware.measured import MeasuredDevice
from memplan.request import UNLIMITED, Request, target_of
from memplan.xla.module import Module
from memplan.xla.replay import replay


def measure(case: Case) -> Measurement:
    """A row for each clock that planned."""
    device = target_of(case.device).device
    clocks = {"roofline": replace(device, efficiency=PEAK), "classes": device}
    step, args, donated = case.built()
    options = {"donate_argnums": donated}
    plain = pipeline.best(step, args, {}, options, Request(UNLIMITED, None, case.device))
    limit = limit_of(case, plain.device_bytes)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, clock in clocks.items():
            path = Path(folder) / f"{name}.json"
            MeasuredDevice(clock, "cuda", "").save(path)
            outcome = pipeline.best(step, args, {}, options, Request(limit, None, str(path)))
            result = outcome.planned.result
            rows.append(
                {
                    "planned_by": name,
                    "fits": outcome.fits,
                    "host_bytes": outcome.host_bytes,
                    "again_flops": result.replay.flops - plain.planned.result.replay.flops,
                    **_over_plain(clocks, result.module, plain.planned.result.module),
                }
            )
    return Measurement(rows)


def _over_plain(clocks: dict[str, Device], planned: Module, plain: Module) -> dict[str, float]:
    """By clock: the planned step's seconds over the plain one's, less 1."""
    return {
        f"over_by_{name}": replay(planned, clock).step_s / replay(plain, clock).step_s - 1
        for name, clock in clocks.items()
    }
