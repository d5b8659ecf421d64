"""Ways to compile a step without a plan of memplan's: plain, under policies of `jax.checkpoint`, by XLA's own means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.candidates import Candidate
from memplan.compiling import compile_plain
from memplan.program import compat
from memplan.xla.target import Target, xla_rematerialization
from memplan.program.trace import Program, trace

REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)  # what a way that does not compile raises


def policies() -> dict[str, Any]:
    """The common policies of `jax.checkpoint`, by what they do."""
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return {
        "jax.checkpoint, nothing saved": jax.checkpoint_policies.nothing_saveable,
        "jax.checkpoint, convolutions and dots saved": jax.checkpoint_policies.dots_saveable,
        "jax.checkpoint, dots without batch dims saved": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "jax.checkpoint, dots without batch dims offloaded": offload,
    }


@dataclass(frozen=True)
class Ways:
    """One step for one device. Policies apply to whatever the step differentiates, as a whole."""

    step: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    target: Target

    def program(self) -> Program:
        return trace(self.step, self.args, {}, self.options)

    def plain(self) -> Candidate:
        return compile_plain(self.program(), self.target, self.args, {})

    def checkpointed(self, policy: Any) -> Candidate:
        def step(*args: Any) -> Any:  # a function of its own: jax remembers traces by function
            return self.step(*args)

        with compat.checkpointed_gradients(policy):
            return compile_plain(trace(step, self.args, {}, self.options), self.target, self.args, {})

    def xla(self, plain: Candidate, budget: int, extra: Mapping[str, Any]) -> Candidate:
        """XLA's own rematerialization, its limit set to the budget."""
        assert plain.executable is not None
        target, flags = xla_rematerialization(self.target, budget, plain.executable.memory.resident_bytes)
        return compile_plain(self.program(), target, self.args, {}, {**flags, **extra}, "xla")


def refusal(error: BaseException) -> str:
    """Why a way does not compile, on one line."""
    return f"does not compile: {str(error).splitlines()[0][:100]}"
