"""One step under one budget, planned and compiled beside the compilation of the step as it is.

What XLA or memplan keep from an earlier compilation makes nothing cheaper, if the process measures one case: the plain
compilation has XLA's file of compiled kernels switched off. The planned one begins with that file empty, as
`memplan.jit` does; the second compilation of a step, where one is needed, finds in it what the first one made.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.cases import Case
from experiments.bench.results import Found
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.loops import host_nbytes, stacked_nbytes
from memplan.planning.schedule import Kind
from memplan.program.lowerable import Lowerable
from memplan.request import UNLIMITED, Request, target_of
from memplan.results.infeasible import floor_of, infeasible
from memplan.units import parse_bytes
from memplan.xla.replay import replay
from memplan.xla.target import Executable, Target

_NO_KERNEL_FILE = {"xla_gpu_kernel_cache_file": ""}


Spent = tuple[float, float]
"""Seconds by the clock, and of all threads of the process."""


def _since(begun: Spent = (0.0, 0.0)) -> Spent:
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def measure(case: Case) -> Found:
    """Compile a step as it is, and planned."""
    return found_of(*row_of(case))


def row_of(case: Case) -> tuple[dict[str, Any], Outcome]:
    """The same, with the outcome."""
    step, args, donated = case.built()
    target, options = target_of(case.device), {"donate_argnums": donated}
    # The first compilation of a process loads much that should not count.
    _compile_plain(target, lambda x: x + 1, [jax.ShapeDtypeStruct((8,), jnp.float32)], {})
    begun = _since()
    plain, plain_spent = _compile_plain(target, step, args, options), _since(begun)
    plain_bytes, jit_step_s = plain.memory.device_bytes, replay(plain.module, target.device).step_s
    del plain  # executables are large
    jax.clear_caches()
    request = Request(limit_of(case, plain_bytes), case.host_budget, case.device, host_state=case.host_state)
    begun = _since()
    found = pipeline.best(step, args, {}, options, request)
    ready = _since(begun)
    row = {
        "plain_bytes": plain_bytes, "jit_step_s": jit_step_s, "budget_bytes": found.limits.device_bytes,
        **_bytes(found), **_seconds(found),
        # By the clock and of all threads: a plain compilation, and everything until the planned step could run.
        **dict(zip(("plain_compile_s", "plain_compile_cpu_s"), plain_spent, strict=True)),
        **dict(zip(("ready_s", "ready_cpu_s"), ready, strict=True)),
    }  # fmt: skip
    if case.host_state:
        alone = pipeline.best(step, args, {}, options, Request(UNLIMITED, device=case.device))
        nbytes = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves([args[i] for i in case.host_state]))
        row |= {"unmodified_bytes": alone.planned.plain.device_bytes, "plain_step_s": alone.step_s}
        row["state_bytes"] = nbytes
    return row, found


def found_of(row: Mapping[str, Any], outcome: Outcome) -> Found:
    """A row of an outcome, with its status, and why nothing fits where that is so."""
    status = "does not fit" if not outcome.fits else "fits" if outcome.plan is not None else "untouched"
    return Found([dict(row)], status, "" if outcome.fits else str(infeasible(outcome, outcome.device_bytes)))


def beside_checkpoint(case: Case) -> Found:
    """The same, and the step with `jax.checkpoint` around its blocks."""
    found, (step, args) = measure(case), case.facts["checkpoint"]()
    request = Request(UNLIMITED, device=case.device)
    other = pipeline.best(step, args, {}, {"donate_argnums": 0}, request)
    more = {"checkpoint_bytes": other.device_bytes, "checkpoint_step_s": other.step_s}
    return replace(found, rows=[{**found.rows[0], **more}])


def limit_of(case: Case, plain_bytes: int) -> int:
    if case.budget is None:
        return UNLIMITED
    return plain_bytes * case.budget // 100 if isinstance(case.budget, int) else parse_bytes(case.budget, 0)


def _compile_plain(
    target: Target, step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Executable:
    """`jax.jit(step, **options).lower(*args).compile()`, for a GPU that need not be here."""
    return target.compile(Lowerable(step, args, {}, options), _NO_KERNEL_FILE)


def _bytes(found: Outcome) -> dict[str, Any]:
    """On the device, by the compiler but for what was predicted and the floor, below which no plan goes.

    Of the unmodified step, XLA's own rematerialization left out, which the plain compilation has.
    """
    made, loops = found.planned, found.program.loops if any(found.program.residuals) else ()
    runs = sum(one.kind is Kind.RUN for one in made.schedule)
    return {
        "unmodified_bytes": (found.unmodified or made.plain).device_bytes,
        "predicted_bytes": made.predicted_bytes, "compiled_bytes": found.device_bytes, "host_bytes": found.host_bytes,
        "floor_bytes": floor_of(found)[0], "planner": found.plan.planner if found.plan else "none",
        "again": runs - len(made.base.problem.kernels) if made.plan is not None else 0,
        "offloaded_bytes": int(made.result.replay.copied_out_nbytes),
        "slab_loops": sum(len(one.loops) for one in found.program.in_slabs),
        "stacked_bytes": sum(stacked_nbytes(*known) for known in loops) if loops else None,
        "moved_bytes": sum(host_nbytes(loop, chosen) for loop, chosen in loops if chosen) if loops else None,
    }  # fmt: skip


def _seconds(found: Outcome) -> dict[str, Any]:
    """By the replay of the compiled schedule; no plan within the budget takes less than the bound."""
    plain, moved = found.unmodified or found.planned.plain, found.planned.result.replay
    return {
        "plain_step_s": plain.replay.step_s, "step_s": found.step_s, "bound_s": found.planned.bound_s,
        "copy_s": moved.copy_s, "hidden_copy_s": moved.hidden_copy_s,
        "stall_s": sum(end - start for start, end in moved.stalls), "compilations": found.compilations,
        "planning_s": found.planned.planning_s,
    }  # fmt: skip
