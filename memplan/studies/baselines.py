"""Compiles a step without memplan's plan: plain, under policies of `jax.checkpoint`, by XLA's own means."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from memplan.compilation.compiler import compile_program
from memplan.compilation.scheduled import ScheduledModule
from memplan.program import compat
from memplan.program.trace import Program, trace
from memplan.xla.target import Target, xla_rematerialization

REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)  # raised if a baseline does not compile


def policies() -> dict[str, Any]:
    """The common policies of `jax.checkpoint`, by description."""
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return {
        "jax.checkpoint, nothing saved": jax.checkpoint_policies.nothing_saveable,
        "jax.checkpoint, convolutions and dots saved": jax.checkpoint_policies.dots_saveable,
        "jax.checkpoint, dots without batch dims saved": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "jax.checkpoint, dots without batch dims offloaded": offload,
    }


@dataclass(frozen=True)
class Baseline:
    """The cost of one baseline: bytes by the compiler, seconds of a step by the replay."""

    device_bytes: int
    host_bytes: int
    step_s: float
    resident_bytes: int


@dataclass(frozen=True)
class Baselines:
    """One step for one device. Policies apply to the whole function that the step differentiates."""

    step: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    target: Target

    def plain(self) -> Baseline:
        return self._compile(trace(self.step, self.args, {}, self.options), self.target)

    def checkpoint(self, policy: Any) -> Baseline:
        def step(*args: Any) -> Any:  # a new function: jax caches traces by function
            return self.step(*args)

        with compat.differentiated_as(partial(jax.checkpoint, policy=policy)):
            return self._compile(trace(step, self.args, {}, self.options), self.target)

    def xla(self, resident_bytes: int, budget: int, extra: Mapping[str, Any] | None = None) -> Baseline:
        """XLA's own rematerialization, with its limit set to the budget."""
        target, flags = xla_rematerialization(self.target, budget, resident_bytes)
        return self._compile(trace(self.step, self.args, {}, self.options), target, {**flags, **(extra or {})})

    def _compile(self, program: Program, target: Target, flags: Mapping[str, Any] | None = None) -> Baseline:
        found = compile_program(program, target, flags)
        reading = ScheduledModule(found.module, self.target.device, program.machine)
        memory = found.memory
        return Baseline(memory.device_bytes, memory.host_bytes, reading.replay.step_s, memory.resident_bytes)


def refusal(error: BaseException) -> str:
    """Why a baseline does not compile, on one line."""
    return f"does not compile: {str(error).splitlines()[0][:100]}"
