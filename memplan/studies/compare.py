"""Compares memplan with other methods: those that jax and XLA offer without a plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memplan import pipeline
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.pipeline import Notify, Request
from memplan.report.comparison import Comparison, Row
from memplan.results.report import versions
from memplan.studies.baselines import REFUSALS, Baseline, Baselines, policies, refusal

_UNTOUCHED = "plain jax, XLA's rematerialization off"


def compare(
    step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], request: Request, notify: Notify
) -> Comparison:
    """Compile a step by every method of jax, XLA and memplan, for one device and budget.

    The policies of `jax.checkpoint` apply to the whole function that the step differentiates.
    """
    target = request.target
    limits = pipeline.limits_of(request, target)
    baselines = Baselines(step, args, options, target)

    def rows() -> Iterator[Row]:
        for name, compiled in _compilations(baselines, limits.device_bytes).items():
            notify(f"compiling: {name}", None)
            yield _baseline_row(name, compiled, limits)
        found = pipeline.best(step, args, {}, options, request, notify)
        if target.is_gpu and found.unmodified is not None:
            plain = found.unmodified
            fits = limits.allow(plain.device_bytes, 0)
            yield Row(_UNTOUCHED, plain.device_bytes, 0, plain.replay.step_s, fits)
        yield _memplan_row(found)

    return Comparison(tuple(rows()), target.device.name, limits.device_bytes, limits.host_bytes, versions())


def _compilations(baselines: Baselines, budget: int) -> dict[str, Callable[[], Baseline]]:
    plain = baselines.plain()
    ways: dict[str, Callable[[], Baseline]] = {"plain jax": lambda: plain}
    for name, policy in policies().items():
        ways[name] = lambda policy=policy: baselines.checkpoint(policy)
    if baselines.target.is_gpu:
        offload = {"xla_gpu_enable_host_memory_offloading": True}
        ways["XLA's rematerialization"] = lambda: baselines.xla(plain.resident_bytes, budget)
        ways["XLA's rematerialization and host offload"] = lambda: baselines.xla(plain.resident_bytes, budget, offload)
    return ways


def _baseline_row(name: str, compiled: Callable[[], Baseline], limits: Limits) -> Row:
    try:
        found = compiled()
    except REFUSALS as error:
        return Row(name, None, None, None, None, refusal(error))
    fits = limits.allow(found.device_bytes, found.host_bytes)
    return Row(name, found.device_bytes, found.host_bytes, found.step_s, fits)


def _memplan_row(found: Outcome) -> Row:
    if not found.fits:
        return Row("memplan", None, None, None, False, f"the smallest that works: {found.device_bytes} bytes")
    in_slabs = ", in slabs" if found.program.in_slabs else ""
    note = "the plain step fits" if found.plan is None else f"compilations: {found.compilations}{in_slabs}"
    return Row("memplan", found.device_bytes, found.host_bytes, found.step_s, True, note)
