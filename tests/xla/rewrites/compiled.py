"""Steps compiled as what a rewrite makes of their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from memplan.hardware import catalog
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.program.lowerable import Lowerable
from memplan.verify.same_module import judge
from memplan.xla import hook
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.target import Target, described_devices
from memplan.xla.write import write
from tests.hlo import read_module


def compile_rewritten(
    step: Any, args: Any, name: str, device: str | None, rewrite: Callable[[Module, Problem], Module]
) -> tuple[Any, Module, Module]:
    """By the hook, judged; the plain module and that one; on a GPU as predicted."""
    modules: list[Module] = []
    done: Any

    def in_hook(text: str) -> str:
        plain = read_module(text)
        found = rewrite(plain, problem_of(plain, on_gpu=device is not None))
        judge(plain, found)
        modules.extend([plain, found])
        problem = problem_of(found, on_gpu=device is not None)
        return write(found, problem, runs(range(len(problem.kernels))))

    def unique(*args: Any) -> Any:
        return step(*args)

    unique.__name__ = name
    if device is not None:
        described_devices(catalog.DEVICES[device])  # loads the plugin that the hook is for
    with hook.intercept(f"jit_{name}", in_hook, "cuda" if device else "cpu") as interception:
        if device is None:
            done = jax.jit(unique).lower(*args).compile()
        else:
            target = Target(catalog.DEVICES[device], described=True)
            done = target.compile(Lowerable(unique, args)).compiled
    interception.check()
    plain, found = modules
    if device is not None:
        problem, result = problem_of(found, on_gpu=True), problem_of(read_module(done.as_text()), on_gpu=True)
        assert [one.name for one in result.kernels] == [one.name for one in problem.kernels]
        assert done.memory_analysis().temp_size_in_bytes == pytest.approx(pack(problem).nbytes, abs=2048)
    return done, plain, found
