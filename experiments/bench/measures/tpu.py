"""One step on a described TPU within a share of its temporaries, beside what others reach there.

All bytes are XLA:TPU's: a plan's after its compilation; those of XLA's own rematerialization from
the refusal of a limit that nothing keeps, which comes before code is generated.
"""

from typing import Any

import jax

from experiments.bench.cases import Case
from experiments.bench.measures.planned import measurement_of, since
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.program.lowerable import Lowerable
from memplan.request import Request, target_of, traced
from memplan.studies.baselines import Baselines
from memplan.xla.platform import OverLimitError

_NOTHING_KEEPS = {"xla_tpu_max_hbm_size_mib": "1"}


def measure(case: Case) -> Measurement:
    """Explore a step plain, plan it, compile it plain, and ask for the least of others."""
    step, args, donated = case.built()
    options: dict[str, Any] = {"donate_argnums": donated}
    target, unlimited = target_of(case.device), Request(device=case.device).unlimited
    program = traced(step, args, {}, options, unlimited)
    start = since()
    plain = pipeline.explore(program, unlimited, lambda stage, share: None, {}).best.planned.plain
    explored = since(start)
    assert isinstance(case.budget, int)
    temporaries = plain.device_bytes - plain.resident_bytes
    budget = plain.resident_bytes + temporaries * case.budget // 100
    start = since()
    outcome = pipeline.best(step, args, {}, options, Request(budget, device=case.device))
    ready = since(start)
    jax.clear_caches()
    lowerable = Lowerable(step, args, {}, options)
    start = since()
    compiled = target.compile(lowerable)
    compilation = since(start)
    baselines = Baselines(step, args, options, target)
    checkpointed = baselines.checkpoint(jax.checkpoint_policies.nothing_saveable)
    row = {
        "plain_bytes": compiled.memory.device_bytes,
        "plain_predicted_bytes": plain.device_bytes,
        "budget_bytes": outcome.limits.device_bytes,
        "predicted_bytes": outcome.planned.predicted_bytes,
        "compiled_bytes": outcome.device_bytes,
        "host_bytes": outcome.host_bytes,
        "planner": outcome.method,
        "compilations": outcome.compilations,
        "plain_step_s": plain.replay.step_s,
        "step_s": outcome.step_s,
        "xla_least_bytes": _least_of_xla(target, lowerable),
        "checkpoint_bytes": checkpointed.device_bytes,
        "checkpoint_step_s": checkpointed.step_s,
        "explored_cpu_s": explored[1],
        "ready_cpu_s": ready[1],
        "plain_compile_cpu_s": compilation[1],
    }
    return measurement_of(row, outcome)


def _least_of_xla(target: Any, lowerable: Lowerable) -> int:
    """The bytes of the step when XLA:TPU rematerializes all that it can."""
    try:
        target.compile(lowerable, _NOTHING_KEEPS)
    except OverLimitError as refusal:
        return refusal.device_bytes
    raise AssertionError("the step fits in 1 MiB")
