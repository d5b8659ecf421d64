"""A plan beside what a user writes by hand: `jax.checkpoint` around the layer, in the same bytes.

The law: within 1.05 of the bytes by hand, the plan of the plain step fits, takes at most 1.05 of
the predicted seconds by hand, and computes the plain step's results. On the CPU the results are
compared: bit for bit if the plan has the plain step's own kernels, by the numbers gate if not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import TimeoutError, get_context
from typing import Any

import jax
import jax.numpy as jnp

import memplan
from experiments.bench.cases import Case
from experiments.bench.measures.bits import Training, differing, has_other_kernels
from experiments.bench.results import Measurement, Row
from memplan.stages import Planned

# Share of the bytes and seconds by hand that a plan may take. Other values to keep come to other
# sums: plans of six small MLPs took up to 4.6 % more bytes than by hand.
MORE = 1.05
# Share of the plain bytes from which the version by hand saves nothing. The first 56 programs have
# none between 0.93 and 1.07.
SAVES_NOTHING = 0.98
_OTHER_BITS = "other bits"  # of a plan that has the plain step's own kernels
_BEYOND = "beyond the gate"  # of memplan's numbers gate, which compares with recompilation alone
# Minutes for all three versions. XLA alone takes five for one that differentiates twice over a mesh
# of 2 x 4; most take half a minute.
_MINUTES = 8
_ERROR_LENGTH = 800  # Characters of an error message to keep.


def measure(case: Case) -> Measurement:
    """The measurement in a process of its own, so that one that ends or hangs is an answer, too."""
    with get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(measure_here, [case]).get(60 * _MINUTES)
        except TimeoutError:
            reason = f"the process ended, or gave no answer in {_MINUTES} minutes"
            return Measurement([{"law": "crashed"}], "crashed", reason)


def measure_here(case: Case) -> Measurement:
    """One row: plain, by hand, and planned within the bytes by hand."""
    step, args, donated = case.built()
    by_hand, *_ = case.facts["checkpoint"]()
    options = {
        "donate_argnums": donated, "device": case.device or None,
        "topology": case.facts["topology"],
    }  # fmt: skip
    # Warm up: the first compilation of a process does work that should not count.
    memplan.jit(lambda x: x + 1, device=case.device or None).plan(jnp.ones(8))
    row: dict[str, Any] = {}
    try:
        plain, row["plain_cpu_s"] = _planned(step, args, None, options)
        row |= {
            "plain_bytes": plain.report.compiled_peak_bytes,
            "plain_step_s": plain.report.baseline_step_s,
        }
        hand, row["hand_cpu_s"] = _planned(by_hand, args, None, options)
        row |= {
            "hand_bytes": hand.report.compiled_peak_bytes,
            "hand_step_s": hand.report.baseline_step_s,
        }
        row["budget_bytes"] = int(MORE * row["hand_bytes"])
        started_s = time.process_time()
        try:
            planned, _ = _planned(step, args, row["budget_bytes"], options)
        finally:
            row["planned_cpu_s"] = time.process_time() - started_s
    except memplan.InfeasibleBudgetError as error:
        row |= {"smallest_bytes": error.smallest_bytes, "law": "refused"}
        return Measurement([row], "does not fit", _first_line(error))
    except Exception as error:
        return Measurement([row | {"law": "crashed"}], "crashed", _first_line(error))
    row |= {
        "compiled_bytes": planned.report.compiled_peak_bytes,
        "step_s": planned.report.predicted_step_s, "way": planned.report.planner,
    }  # fmt: skip
    if not case.device:
        row["numbers"] = _numbers(Training(step, args, donated, steps=1), planned)
    return Measurement([row | {"law": law_of(row)}], planned.report.status)


def law_of(row: Row) -> str:
    """Whether the law holds for a step whose plan fits, or what breaks it."""
    if row.get("numbers") in (_OTHER_BITS, _BEYOND):
        return row["numbers"]
    return "holds" if row["step_s"] <= MORE * row["hand_step_s"] else "slower"


def _planned(
    step: Callable[..., Any],
    args: Sequence[Any],
    budget: int | None,
    options: Mapping[str, Any],
) -> tuple[Planned, float]:
    """A planned step, and the CPU seconds until it is compiled."""
    jax.clear_caches()
    started_s = time.process_time()
    planned = memplan.jit(step, budget=budget, **options).plan(*args)
    return planned, time.process_time() - started_s


def _numbers(training: Training, planned: Planned) -> str:
    """How the results of a planned step are those of the plain step."""
    results = training.run(planned.compile()), training.run(training.plain())
    if not any(differing(*results)):
        return "equal bits"
    if not has_other_kernels(planned):
        return _OTHER_BITS
    return "within the gate" if training.passes_gate(planned) else _BEYOND


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"[:_ERROR_LENGTH]
