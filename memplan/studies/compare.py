"""Compares memplan with the methods of jax and XLA that need no plan."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memplan import pipeline
from memplan.compilation.deadline import Deadline
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.pipeline import Notify
from memplan.report.comparison import Comparison, Row
from memplan.request import Request, limits_of
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS, Baseline, Baselines, policies, refusal
from memplan.studies.ended import returned, rows_until_ended
from memplan.xla.platform import Options, OverLimitError

_UNTOUCHED = "plain jax, XLA's rematerialization off"


def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Comparison:
    """Compile a step by every method of jax, XLA and memplan, for one device and budget.

    The policies of `jax.checkpoint` apply to the whole function that the step differentiates. Their
    bytes are predicted where that is enough (`Baselines.checkpoint`), and a note says so.

    Raises:
      Interrupted: Ctrl-C ended it; it has the rows that are done.
    """
    deadline = Deadline(request.time_limit)
    target = request.target
    limits = limits_of(request, target)
    baselines = Baselines(step, args, options, target)

    def rows() -> Iterator[Row]:
        for name, compiled in _compilations(baselines, limits.device_bytes).items():
            deadline.check()
            notify(name, None)
            yield _baseline_row(name, compiled, limits)
        deadline.check()
        outcome = pipeline.best(step, args, {}, options, request, notify, deadline)
        if target.backend.rematerializes and outcome.unmodified is not None:
            plain = outcome.unmodified
            fits = limits.allow(plain.device_bytes, 0)
            yield Row(_UNTOUCHED, plain.device_bytes, 0, plain.replay.step_s, fits)
        yield _memplan_row(outcome)

    done, ended_by = rows_until_ended(rows())
    comparison = Comparison(
        done,
        target.device.name,
        limits.device_bytes,
        limits.host_bytes,
        versions(),
        target.device.efficiency.error,
        ended_by,
    )
    return returned(comparison, ended_by)


def _compilations(baselines: Baselines, budget: int) -> dict[str, Callable[[], Baseline]]:
    plain = functools.cache(baselines.plain)
    compilations: dict[str, Callable[[], Baseline]] = {"plain jax": plain}
    for name, policy in policies().items():
        compilations[name] = functools.partial(baselines.checkpoint, policy)

    def xla(options: Options) -> Baseline:
        resident_bytes = 0
        with contextlib.suppress(OverLimitError):  # such a limit does not depend on them
            resident_bytes = plain().resident_bytes
        return baselines.xla(resident_bytes, budget, options)

    for name, options in baselines.target.platform.rematerializations.items():
        compilations[name] = functools.partial(xla, options)
    return compilations


def _baseline_row(name: str, compiled: Callable[[], Baseline], limits: Limits) -> Row:
    try:
        baseline = compiled()
    except REFUSALS as error:
        return Row(name, None, None, None, None, refusal(error))
    fits = limits.allow(baseline.device_bytes, baseline.host_bytes)
    note = "" if baseline.is_compiled else "predicted"
    return Row(name, baseline.device_bytes, baseline.host_bytes, baseline.step_s, fits, note)


def _memplan_row(outcome: Outcome) -> Row:
    if not outcome.fits and outcome.ended_by:
        return Row("memplan", None, None, None, False, f"nothing until the {outcome.ended_by}")
    if not outcome.fits:
        note = f"the smallest that works: {outcome.device_bytes} bytes"
        return Row("memplan", None, None, None, False, note)
    in_slabs = ", in slabs" if outcome.program.in_slabs else ""
    note = f"compilations: {outcome.compilations}{in_slabs}"
    if outcome.plan is None:
        note = "the plain step fits"
    elif outcome.ended_by:
        note += f"; the {outcome.ended_by} ended planning"
    return Row("memplan", outcome.device_bytes, outcome.host_bytes, outcome.step_s, True, note)
