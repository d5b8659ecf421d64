"""Other ways to make a step fit, beside memplan's: what jax and XLA offer without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan import pipeline
from memplan.candidates import Candidate
from memplan.errors import InfeasibleBudgetError
from memplan.pipeline import Request
from memplan.planning.budget import parse_bytes
from memplan.refining import Notify
from memplan.report.comparison import Comparison, Row
from memplan.summary import versions
from memplan.ways import REFUSALS, Ways, policies, refusal


@dataclass(frozen=True)
class _Comparing:
    ways: Ways
    budget: int
    host_budget: int
    notify: Notify

    def rows(self, request: Request) -> Iterator[Row]:
        plain = self.ways.plain()
        yield self.row("plain jax", lambda: plain)
        for name, policy in policies().items():
            yield self.row(name, lambda policy=policy: self.ways.checkpointed(policy))
        if self.ways.target.is_gpu:
            yield self.row("XLA's rematerialization", lambda: self.ways.xla(plain, self.budget, {}))
            offload = {"xla_gpu_enable_host_memory_offloading": True}
            whole = "XLA's rematerialization and host offload"
            yield self.row(whole, lambda: self.ways.xla(plain, self.budget, offload))
        yield self.memplan(request)

    def row(self, name: str, compile: Callable[[], Candidate]) -> Row:
        self.notify(f"compiling: {name}", None)
        try:
            found = compile()
        except REFUSALS as error:
            return Row(name, None, None, None, None, refusal(error))
        fits = found.device_bytes <= self.budget and found.host_bytes <= self.host_budget
        return Row(name, found.device_bytes, found.host_bytes, found.step_s, fits)

    def memplan(self, request: Request) -> Row:
        ways = self.ways
        try:
            report = pipeline.run(ways.step, ways.args, {}, ways.options, request, self.notify).report
        except InfeasibleBudgetError as error:
            return Row("memplan", None, None, None, False, f"the smallest that works: {error.smallest_bytes} bytes")
        way = {"none": "the plain step fits", "xla": "XLA's rematerialization is the fastest that fits"}
        note = way.get(report.planner, f"{report.planner}: {report.attempts} candidates compiled")
        return Row("memplan", report.compiled_peak_bytes, report.host_peak_bytes, report.predicted_step_s, True, note)


def compare(
    step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], request: Request, notify: Notify
) -> Comparison:
    """Compile a step in every way that jax, XLA and memplan know, for one device and budget.

    The policies of `jax.checkpoint` are applied to whatever the step differentiates, as a whole.
    """
    target = pipeline.target_of(request.device)
    budget = parse_bytes(request.budget, target.device.memory_bytes)
    host_budget = pipeline.host_budget_of(request, target)
    comparing = _Comparing(Ways(step, args, options, target), budget, host_budget, notify)
    return Comparison(tuple(comparing.rows(request)), target.device.name, budget, host_budget, versions())
