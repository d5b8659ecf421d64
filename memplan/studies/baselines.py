"""Compiles a step without memplan: plain, with `jax.checkpoint`, with XLA's rematerialization.

What XLA does not rematerialize has the bytes and seconds of its scheduled module; then the
compilation may end there.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from memplan.compilation.compiler import compile_program
from memplan.compilation.scheduled import ScheduledModule
from memplan.program import compat
from memplan.program.trace import Program, trace
from memplan.xla.hook import Stopped
from memplan.xla.module import Module
from memplan.xla.target import Target

# A baseline that does not compile raises one of these.
REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)


def policies() -> dict[str, Any]:
    """The common policies of `jax.checkpoint`, by description."""
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return {
        "jax.checkpoint, nothing saved": jax.checkpoint_policies.nothing_saveable,
        "jax.checkpoint, convolutions and dots saved": jax.checkpoint_policies.dots_saveable,
        "jax.checkpoint, dots without batch dims saved": (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        ),
        "jax.checkpoint, dots without batch dims offloaded": offload,
    }


@dataclass(frozen=True)
class Baseline:
    """The cost of one baseline: bytes, replayed seconds."""

    device_bytes: int
    host_bytes: int
    step_s: float
    resident_bytes: int
    is_compiled: bool = True  # its bytes are XLA's; else they are predicted


@dataclass(frozen=True)
class Baselines:
    """One step for one device. Policies apply to the whole function that it differentiates."""

    step: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    target: Target

    def plain(self) -> Baseline:
        return self._compile(trace(self.step, self.args, {}, self.options), self.target)

    def checkpoint(self, policy: Any) -> Baseline:
        """With a policy of `jax.checkpoint`, compiled only if a prediction is not enough."""

        def step(*args: Any) -> Any:  # a new function: jax caches traces by function
            return self.step(*args)

        with compat.differentiated_as(partial(jax.checkpoint, policy=policy)):
            program = trace(step, self.args, {}, self.options)
            return self._predicted(program) or self._compile(program, self.target)

    def xla(
        self, resident_bytes: int, budget: int, extra: Mapping[str, Any] | None = None
    ) -> Baseline:
        """XLA's own rematerialization, with its limit set to the budget."""
        target, flags = self.target.rematerialized_within(budget, resident_bytes)
        return self._compile(
            trace(self.step, self.args, {}, self.options), target, {**flags, **(extra or {})}
        )

    def _predicted(self, program: Program) -> Baseline | None:
        """The baseline as XLA schedules it; None if XLA may change it or refuse it after that.

        XLA:CPU refuses annotations of host memory only when it generates code. Bytes on the host
        are predicted for plans alone.
        """
        device = self.target.device
        if not self.target.backend.has_own_memory:
            return None
        modules = list[Module]()

        def read(module: Module) -> None:
            modules.append(module)
            raise Stopped

        with contextlib.suppress(Stopped):
            compile_program(program, self.target, rewrite=read)
        scheduled = ScheduledModule(modules[0], device, program.machine)
        resident_bytes = scheduled.resident_bytes
        if scheduled.device_bytes > self.target.rematerializes_above(resident_bytes):
            return None
        if _uses_host(modules[0]):
            return None
        step_s = scheduled.replay.step_s
        return Baseline(scheduled.device_bytes, 0, step_s, resident_bytes, is_compiled=False)

    def _compile(
        self, program: Program, target: Target, flags: Mapping[str, Any] | None = None
    ) -> Baseline:
        compilation = compile_program(program, target, flags)
        module = compilation.module
        scheduled = ScheduledModule(module, self.target.device, program.machine)
        memory = compilation.memory
        return Baseline(
            device_bytes=memory.device_bytes,
            host_bytes=memory.host_bytes,
            step_s=scheduled.replay.step_s,
            resident_bytes=memory.resident_bytes,
        )


def refusal(error: BaseException) -> str:
    """Why a baseline does not compile, on one line."""
    return f"does not compile: {str(error).splitlines()[0][:100]}"


def _uses_host(module: Module) -> bool:
    """Does an instruction have its result in host memory?"""
    ops = (op for body in module.values() for op in body.ops.values())
    return any(array.on_host for op in ops for array in op.result)
