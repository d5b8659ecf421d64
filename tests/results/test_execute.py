"""A planned step is called like the step; the gate detects other numbers."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.compilation.outcome import Outcome
from memplan.errors import MemplanError, OutOfMemoryError
from memplan.planning.transforms import StateOnHost
from memplan.program.state.host_state import place_leaf
from memplan.program.trace import WithStateOnHost, trace
from memplan.results import execute
from memplan.results.execute import Runner, numbers_gate
from memplan.xla import local
from memplan.xla.target import Executable, Memory, Target
from tests.arrays import shapes_of
from tests.compilation.modules import CPU, V100
from tests.compilation.outcomes import outcome


def step(weights: Any, x: jax.Array) -> Any:
    return {"w": weights["w"] + x}, x.sum()


def wrong(weights: Any, x: jax.Array) -> Any:
    return {"w": weights["w"] + 1.0001 * x}, x.sum()


ARGS = ({"w": jnp.arange(4.0)}, jnp.ones(4))
PROGRAM = trace(step, ARGS, {}, {"donate_argnums": 0})


def compiled_as(call: Any, on_host: bool = False) -> Outcome:
    """The outcome of a step that was compiled into this function."""
    moved = PROGRAM.transformed(WithStateOnHost(StateOnHost((0,)), frozenset({0})), None)
    compiled = outcome(moved if on_host else PROGRAM, 10)
    executable = Executable(call, compiled.executable.memory)
    return replace(compiled, executable=executable, target=Target(CPU, described=False))


def test_a_runner_runs() -> None:
    run = Runner(compiled_as(step))
    new, total = run(*ARGS)
    assert run.observed_bytes is None and total == 4  # a CPU tells nothing
    np.testing.assert_array_equal(new["w"], np.arange(4.0) + 1)


def test_state_on_the_host_is_fetched_donated_and_returned() -> None:
    kinds: list[str] = []

    def call(weights: Any, x: jax.Array) -> Any:
        kinds.append(weights["w"].sharding.memory_kind)
        return step(weights, x)

    state = place_leaf(jnp.arange(4.0), on_host=True)
    new, total = Runner(compiled_as(call, on_host=True))({"w": state}, ARGS[1])
    assert kinds == [jax.devices()[0].default_memory().kind] and kinds != ["pinned_host"]
    assert new["w"].sharding.memory_kind == "pinned_host" and total.sharding.memory_kind == kinds[0]
    assert state.is_deleted()


class Gpu:
    """A GPU's allocator as a runner sees it: bytes in use, peak, largest block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks: Sequence[int] = (100,)):
        self.in_use, self.peak, self.blocks = 20, 50, list(blocks)
        monkeypatch.setattr(local, "room", self.room)
        monkeypatch.setattr(execute, "_PATIENCE_S", 0.05)

    def room(self) -> local.Room:
        block = self.blocks.pop(0) if len(self.blocks) > 1 else self.blocks[0]
        return local.Room(self.in_use, self.peak, 200, block)

    def runner(self, call: Any) -> Runner:
        executable = Executable(call, Memory(60 + 10, 0, 60, 10))
        target = Target(V100, described=False)
        return Runner(replace(outcome(PROGRAM, 100), executable=executable, target=target))


def test_the_observed_peak_is_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)

    def taking(nbytes: int) -> Any:
        def call(*args: Any) -> Any:
            gpu.peak = max(gpu.peak, gpu.in_use + nbytes)
            return step(*args)

        return call

    run = gpu.runner(taking(29))  # beneath what the process took before, for something else
    run(*ARGS)
    assert run.observed_bytes is None
    run = gpu.runner(taking(65))
    run(*ARGS)
    # With its arguments, which were in use, but not the other 10 bytes.
    assert run.observed_bytes == 75
    gpu.in_use = 10
    run(*ARGS)
    assert run.observed_bytes == 75


def test_a_runner_waits_for_memory_that_others_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, blocks=[59, 59, 59, 60])
    assert gpu.runner(step)(*ARGS)[1] == 4


def test_a_step_that_gets_no_block_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Gpu(monkeypatch, blocks=[59]).runner(lambda *_: pytest.fail("started"))
    with pytest.raises(OutOfMemoryError, match="not started"):
        run(*ARGS)


def test_a_call_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16B with allocator a."
        ),
        jax.errors.JaxRuntimeError("INTERNAL: no"),
        KeyboardInterrupt(),  # type: ignore[list-item]
    ]

    def call(*args: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return step(*args)

    run = Gpu(monkeypatch).runner(call)
    with pytest.raises(OutOfMemoryError, match="a block of 16 B") as caught:
        run(*ARGS)
    assert caught.value.__suppress_context__ and caught.value.needed_bytes == 16
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run(*ARGS)
    with pytest.raises(KeyboardInterrupt):
        run(*ARGS)
    assert run(*ARGS)[1] == 4 and not execute._Calls.running


def test_two_calls_at_once_are_not_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    first_is_in, second_is_done = threading.Event(), threading.Event()

    def call(*args: Any) -> Any:
        if not first_is_in.is_set():
            first_is_in.set()
            assert second_is_done.wait(10)
        else:
            gpu.peak += 1000
        return step(*args)

    run = gpu.runner(call)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(run, *ARGS)
        assert first_is_in.wait(10)
        assert run(*ARGS)[1] == 4
        second_is_done.set()
        assert first.result()[1] == 4
    assert run.observed_bytes is None


def test_the_gate_passes_equal_numbers_alone() -> None:
    assert numbers_gate(compiled_as(step), ARGS, {}).passes
    assert not numbers_gate(compiled_as(wrong), ARGS, {}).passes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(ARGS))


def test_numbers_need_arrays() -> None:
    with pytest.raises(MemplanError, match="pass arrays"):
        numbers_gate(compiled_as(step), shapes_of(ARGS), {})
