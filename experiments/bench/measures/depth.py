"""What exploring one step costs as it grows deeper, by the kernels of its module.

Nothing is compiled. A step is explored without a limit, at half of its bytes, and within 3 % more
than its smallest plan; what a limit adds to the process's CPU seconds is the cost of planning.
Slabs are left out, since they make another module.
"""

import time
from typing import Any

import jax

from experiments.bench.cases import Case
from experiments.bench.measures.planned import UNLIMITED
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.compilation.outcome import Explored
from memplan.request import Request, traced

_TIGHT = 1.03  # of the bytes of the smallest plan
_WARMING = 2  # explorations of which the last counts: the first in a process loads libraries


def measure(case: Case) -> Measurement:
    """CPU seconds of an exploration without a limit, and what the limits add."""
    step, args, donated = case.built()

    def explore(budget: int) -> tuple[Explored, float]:
        request = Request(budget, device=case.device, split=False)
        options: dict[str, Any] = {"donate_argnums": donated}
        program = traced(step, args, {}, options, request, lambda *_: None)
        jax.clear_caches()
        started_s = time.process_time()
        best = pipeline.explore(program, request, lambda *_: None, modules={}).best
        return best, time.process_time() - started_s

    whole, unlimited_cpu_s = [explore(UNLIMITED) for _ in range(_WARMING)][-1]
    half, half_cpu_s = explore(whole.device_bytes // 2)
    smallest, _ = explore(whole.planned.plain.resident_bytes)
    tight, tight_cpu_s = explore(int(_TIGHT * smallest.device_bytes))
    return Measurement(
        [
            {
                "kernels": len(whole.planned.plain.problem.kernels),
                "plain_bytes": whole.device_bytes,
                "smallest_bytes": smallest.device_bytes,
                "unlimited_cpu_s": unlimited_cpu_s,
                "half_cpu_s": half_cpu_s - unlimited_cpu_s,
                "tight_cpu_s": tight_cpu_s - unlimited_cpu_s,
                "half_fits": half.fits,
                "tight_fits": tight.fits,
            }
        ]
    )
