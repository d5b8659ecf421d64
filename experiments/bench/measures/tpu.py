"""One step on a described TPU within shares of its temporaries, beside what others reach there.

All bytes are XLA:TPU's: a plan's after its compilation; those of XLA's own rematerialization from
the refusal of a limit that nothing keeps, which comes before code is generated.
"""

from dataclasses import replace
from typing import Any

import jax

from experiments.bench.cases import Case
from experiments.bench.measures.planned import since
from experiments.bench.results import Measurement, Row
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.program.lowerable import Lowerable
from memplan.program.trace import Program
from memplan.request import Request, target_of, traced
from memplan.studies.baselines import Baselines
from memplan.xla.platform import OverLimitError
from memplan.xla.target import Memory

_NOTHING_KEEPS = {"xla_tpu_max_hbm_size_mib": "1"}


def measure(case: Case) -> Measurement:
    """Explore a step plain, compile it, ask for the least of others, and plan it within shares."""
    step, args, donated = case.built()
    options: dict[str, Any] = {"donate_argnums": donated}
    target, unlimited = target_of(case.device), Request(device=case.device).unlimited
    program = traced(step, args, {}, options, unlimited)
    start = since()
    plain = pipeline.explore(program, unlimited, _quietly, {}).best.planned.plain
    explored = since(start)
    jax.clear_caches()
    lowerable = Lowerable(step, args, {}, options)
    start = since()
    compiled = target.compile(lowerable)
    compilation = since(start)
    baselines = Baselines(step, args, options, target)
    checkpointed = baselines.checkpoint(jax.checkpoint_policies.nothing_saveable)
    others = {
        "plain_bytes": compiled.memory.device_bytes,
        "plain_predicted_bytes": plain.device_bytes,
        "plain_step_s": plain.replay.step_s,
        "xla_least_bytes": _least_of_xla(target, lowerable),
        "checkpoint_bytes": checkpointed.device_bytes,
        "checkpoint_step_s": checkpointed.step_s,
        "explored_cpu_s": explored[1],
        "plain_compile_cpu_s": compilation[1],
    }
    plans = [_plan(program, compiled.memory, case.device, share) for share in case.facts["shares"]]
    status = "fits" if all(plan["keeps"] for plan in plans) else "does not fit"
    return Measurement([{**others, **plan} for plan in plans], status)


def _plan(program: Program, plain: Memory, device: str, share: int) -> Row:
    """The step planned within a share, in percent, of the plain step's temporaries."""
    budget = plain.resident_bytes + plain.temp_bytes * share // 100
    start = since()
    outcome, named_bytes = _within(program, Request(budget, device=device))
    return {
        "share": share,
        "budget_bytes": budget,
        "named_bytes": named_bytes,
        "predicted_bytes": outcome.planned.predicted_bytes,
        "compiled_bytes": outcome.device_bytes,
        "host_bytes": outcome.host_bytes,
        "planner": outcome.method,
        "compilations": outcome.compilations,
        "step_s": outcome.step_s,
        "ready_cpu_s": since(start)[1],
        "keeps": outcome.fits,
    }


def _within(program: Program, request: Request) -> tuple[Outcome, int | None]:
    """The outcome within a budget; if none fits, that within the budget that the refusal names."""
    try:
        outcome, named_bytes = pipeline.run(program, request, _quietly), None
    except InfeasibleBudgetError as refusal:
        named_bytes = refusal.smallest_bytes
        within = replace(request, budget=named_bytes)
        outcome = pipeline.best_of(program, within, _quietly)
    assert isinstance(outcome, Outcome)  # jax's cache is off
    return outcome, named_bytes


def _quietly(stage: str, share: float | None) -> None:
    pass


def _least_of_xla(target: Any, lowerable: Lowerable) -> int:
    """The bytes of the step when XLA:TPU rematerializes all that it can."""
    try:
        target.compile(lowerable, _NOTHING_KEEPS)
    except OverLimitError as refusal:
        return refusal.device_bytes
    raise AssertionError("the step fits in 1 MiB")
