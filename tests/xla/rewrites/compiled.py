"""Steps compiled as what a rewrite makes of their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from memplan.hardware import catalog
from memplan.hardware.backend import CPU, GPU
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.program import compat
from memplan.program.lowerable import Lowerable
from memplan.verify.same_module import judge
from memplan.xla import hook
from memplan.xla.buffers import problem_of
from memplan.xla.gpu.platform import described_devices
from memplan.xla.module import Module
from memplan.xla.target import Target
from memplan.xla.write import write

# Options of a compilation for a CPU: without them, kernels that compute the same may round otherwise.
OPTIMIZED = {"xla_backend_optimization_level": 3}


def compile_rewritten(
    step: Any,
    args: Any,
    name: str,
    device: str | None,
    rewrite: Callable[[Module, Problem], Module],
) -> tuple[Any, Module, Module]:
    """By the hook, judged; the plain module and that one; on a GPU as predicted."""
    modules: list[Module] = []
    done: Any

    def in_hook(plain: Module) -> Module:
        rewritten = rewrite(plain, problem_of(plain, backend=GPU if device else CPU))
        judge(plain, rewritten)
        modules.extend([plain, rewritten])
        problem = problem_of(rewritten, backend=GPU if device else CPU)
        return write(rewritten, problem, runs(range(len(problem.kernels))))

    def unique(*args: Any) -> Any:
        return step(*args)

    unique.__name__ = name
    if device is not None:
        described_devices(catalog.DEVICES[device])  # loads the plugin that the hook is for
    with hook.intercept(f"jit_{name}", in_hook, "cuda" if device else "cpu") as interception:
        if device is None:
            done = jax.jit(unique, compiler_options=OPTIMIZED).lower(*args).compile()
        else:
            target = Target(catalog.DEVICES[device], described=True)
            done = target.compile(Lowerable(unique, args)).compiled
    interception.check()
    plain, rewritten = modules
    if device is not None:
        problem = problem_of(rewritten, backend=GPU)
        result = problem_of(Module.read(compat.module_of(done)), backend=GPU)
        assert [kernel.name for kernel in result.kernels] == [
            kernel.name for kernel in problem.kernels
        ]
        predicted_nbytes = pack(problem).nbytes
        assert done.memory_analysis().temp_size_in_bytes == pytest.approx(
            predicted_nbytes, abs=2048
        )
    return done, plain, rewritten
