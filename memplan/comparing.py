"""Other ways to make a step fit, beside memplan's: what jax and XLA offer without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan import pipeline
from memplan.candidates import Candidate
from memplan.errors import InfeasibleBudgetError
from memplan.pipeline import Notify, Request, compile_plain
from memplan.planning.budget import parse_bytes
from memplan.program import compat
from memplan.program.targets import Target, xla_rematerialization
from memplan.program.trace import Program, trace
from memplan.report.comparison import Comparison, Row
from memplan.summary import versions


def _policies() -> dict[str, Any]:
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return {
        "jax.checkpoint, nothing saved": jax.checkpoint_policies.nothing_saveable,
        "jax.checkpoint, convolutions and dots saved": jax.checkpoint_policies.dots_saveable,
        "jax.checkpoint, dots without batch dims saved": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "jax.checkpoint, dots without batch dims offloaded": offload,
    }


@dataclass(frozen=True)
class _Comparing:
    step: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    target: Target
    budget: int
    host_budget: int
    notify: Notify

    def rows(self, request: Request) -> Iterator[Row]:
        plain = self.plain()
        yield self.row("plain jax", lambda: plain)
        for name, policy in _policies().items():
            yield self.row(name, lambda policy=policy: self.checkpointed(policy))
        if self.target.is_gpu:
            yield self.row("XLA's rematerialization", lambda: self.xla(plain, {}))
            offload = {"xla_gpu_enable_host_memory_offloading": True}
            yield self.row("XLA's rematerialization and host offload", lambda: self.xla(plain, offload))
        yield self.memplan(request)

    def row(self, name: str, compile: Callable[[], Candidate]) -> Row:
        self.notify(f"compiling: {name}", None)
        try:
            found = compile()
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            return Row(name, None, None, None, None, f"does not compile: {str(error).splitlines()[0][:100]}")
        fits = found.device_bytes <= self.budget and found.host_bytes <= self.host_budget
        return Row(name, found.device_bytes, found.host_bytes, found.step_s, fits)

    def plain(self) -> Candidate:
        return compile_plain(self.program(), self.target, self.args, {})

    def program(self) -> Program:
        return trace(self.step, self.args, {}, self.options)

    def checkpointed(self, policy: Any) -> Candidate:
        def step(*args: Any) -> Any:  # a function of its own: jax remembers traces by function
            return self.step(*args)

        with compat.checkpointed_gradients(policy):
            return compile_plain(trace(step, self.args, {}, self.options), self.target, self.args, {})

    def xla(self, plain: Candidate, extra: Mapping[str, Any]) -> Candidate:
        assert plain.executable is not None
        memory = plain.executable.memory
        target, flags = xla_rematerialization(self.target, self.budget, memory.device_bytes - memory.temp_bytes)
        return compile_plain(self.program(), target, self.args, {}, {**flags, **extra}, "xla")

    def memplan(self, request: Request) -> Row:
        try:
            report = pipeline.run(self.step, self.args, {}, self.options, request, self.notify).report
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
    comparing = _Comparing(step, args, options, target, budget, host_budget, notify)
    return Comparison(tuple(comparing.rows(request)), target.device.name, budget, host_budget, versions())
