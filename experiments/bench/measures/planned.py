"""One step under one budget, planned and compiled, beside the compilation of the plain step.

If a process measures one case, no cache of an earlier compilation makes anything cheaper: the plain
compilation has XLA's file of compiled kernels switched off, and the planned one starts with that
file empty, as `memplan.jit` does. A second compilation of a step, if needed, finds the first one's
kernels.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.cases import Case
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.loops import host_nbytes, stacked_nbytes
from memplan.planning.schedule import Kind
from memplan.program.lowerable import Lowerable
from memplan.request import UNLIMITED, Request, target_of
from memplan.results.infeasible import WorkingBudget, floor_of, infeasible
from memplan.units import parse_bytes
from memplan.xla.replay import replay
from memplan.xla.target import Executable, Target

_NO_KERNEL_FILE = {"xla_gpu_kernel_cache_file": ""}


Spent = tuple[float, float]
"""Wall-clock seconds, and CPU seconds of all threads."""


def since(start: Spent = (0.0, 0.0)) -> Spent:
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(case: Case) -> Measurement:
    """Compile a step plain and planned."""
    return measurement_of(*row_of(case))


def row_of(case: Case) -> tuple[dict[str, Any], Outcome]:
    """The row of a case, and its outcome."""
    step, args, donated = case.built()
    target, options = target_of(case.device), {"donate_argnums": donated}
    # Warm up: the first compilation of a process does work that should not count.
    _compile_plain(target, lambda x: x + 1, [jax.ShapeDtypeStruct((8,), jnp.float32)], {})
    start = since()
    plain, plain_spent = _compile_plain(target, step, args, options), since(start)
    plain_bytes, jit_step_s = plain.memory.device_bytes, replay(plain.module, target.device).step_s
    del plain  # executables are large
    jax.clear_caches()
    request = Request(
        limit_of(case, plain_bytes), case.host_budget, case.device, host_state=case.host_state
    )
    start = since()
    outcome = pipeline.best(step, args, {}, options, request)
    ready = since(start)
    row = {
        "plain_bytes": plain_bytes, "jit_step_s": jit_step_s,
        "budget_bytes": outcome.limits.device_bytes,
        **_bytes(outcome), **_seconds(outcome),
        # Wall-clock and CPU seconds of a plain compilation, and until the planned step is ready.
        **dict(zip(("plain_compile_s", "plain_compile_cpu_s"), plain_spent, strict=True)),
        **dict(zip(("ready_s", "ready_cpu_s"), ready, strict=True)),
    }  # fmt: skip
    if case.host_state:
        alone = pipeline.best(step, args, {}, options, Request(UNLIMITED, device=case.device))
        nbytes = sum(
            leaf.dtype.itemsize * leaf.size
            for leaf in jax.tree.leaves([args[i] for i in case.host_state])
        )
        row |= {"unmodified_bytes": alone.planned.plain.device_bytes, "plain_step_s": alone.step_s}
        row["state_bytes"] = nbytes
    return row, outcome


def measurement_of(row: Mapping[str, Any], outcome: Outcome) -> Measurement:
    """The measurement of an outcome's row, with its status, and why nothing fits if so."""
    status = (
        "does not fit" if not outcome.fits else "fits" if outcome.plan is not None else "untouched"
    )
    reason = ""
    if not outcome.fits:
        reason = str(infeasible(outcome, WorkingBudget(outcome.device_bytes, outcome.step_s)))
    return Measurement([dict(row)], status, reason)


def beside_checkpoint(case: Case) -> Measurement:
    """The same measurement, and the step with `jax.checkpoint` around its blocks."""
    measured, (step, args) = measure(case), case.facts["checkpoint"]()
    request = Request(UNLIMITED, device=case.device)
    checkpointed = pipeline.best(step, args, {}, {"donate_argnums": 0}, request)
    more = {"checkpoint_bytes": checkpointed.device_bytes, "checkpoint_step_s": checkpointed.step_s}
    return replace(measured, rows=[{**measured.rows[0], **more}])


def limit_of(case: Case, plain_bytes: int) -> int:
    if case.budget is None:
        return UNLIMITED
    return (
        plain_bytes * case.budget // 100
        if isinstance(case.budget, int)
        else parse_bytes(case.budget, 0)
    )


def _compile_plain(
    target: Target, step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Executable:
    """`jax.jit(step, **options).lower(*args).compile()` for a local or described GPU."""
    return target.compile(Lowerable(step, args, {}, options), _NO_KERNEL_FILE)


def _bytes(outcome: Outcome) -> dict[str, Any]:
    """Device bytes by the compiler, the predicted bytes, and the floor of all plans.

    The unmodified step lacks XLA's own rematerialization, which the plain compilation has.
    """
    planned = outcome.planned
    loops = outcome.program.loops
    runs = sum(action.kind is Kind.RUN for action in planned.schedule)
    return {
        "unmodified_bytes": (outcome.unmodified or planned.plain).device_bytes,
        "predicted_bytes": planned.predicted_bytes, "compiled_bytes": outcome.device_bytes,
        "host_bytes": outcome.host_bytes,
        "floor_bytes": floor_of(outcome)[0],
        "planner": outcome.plan.planner if outcome.plan else "none",
        "again": runs - len(planned.base.problem.kernels) if planned.plan is not None else 0,
        "offloaded_bytes": int(planned.result.replay.copied_out_nbytes),
        "slab_loops": sum(len(record.loops) for record in outcome.program.in_slabs),
        "stacked_bytes": (
            sum(stacked_nbytes(loop, chosen) for loop, chosen in loops) if loops else None
        ),
        "moved_bytes": (
            sum(host_nbytes(loop, chosen) for loop, chosen in loops if chosen) if loops else None
        ),
    }  # fmt: skip


def _seconds(outcome: Outcome) -> dict[str, Any]:
    """Seconds by the replay of the compiled schedule; the bound holds for all plans."""
    plain, moved = outcome.unmodified or outcome.planned.plain, outcome.planned.result.replay
    return {
        "plain_step_s": plain.replay.step_s, "step_s": outcome.step_s,
        "bound_s": outcome.planned.bound_s,
        "copy_s": moved.copy_s, "hidden_copy_s": moved.hidden_copy_s,
        "stall_s": sum(end - start for start, end in moved.stalls),
        "compilations": outcome.compilations,
        "planning_s": outcome.planned.planning_s,
    }  # fmt: skip
