"""A kernel is known again in another module, and a different one is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.studies.profile import by_fingerprint, seconds_of_kernels
from memplan.xla.kernel_fingerprint import kernel_fingerprint
from memplan.xla.module import Module
from memplan.xla.replay import replay
from tests.hlo import read_module
from tests.xla.small_modules import ADD, BIG, module
from tests.xla.steps import array

CPU = catalog.local_cpu(2, 2**33)


def compiled(step: Callable[..., Any], *args: Any) -> Module:
    executable = jax.jit(step).lower(*args).compile().runtime_executable()
    assert executable is not None
    return Module.read(executable.hlo_modules()[0].as_serialized_hlo_module_proto())


def fingerprints(step: Callable[..., Any], *args: Any) -> dict[str, str]:
    """Of the kernels that the replay of a step runs outside of loops, by name."""
    of = compiled(step, *args)
    names = replay(of, CPU).seconds
    ops = of.entry.ops.values()
    return {op.name: kernel_fingerprint(of, of.entry, op) for op in ops if op.name in names}


def product(x: Any, w: Any) -> Any:
    return x @ w


def later(x: Any, w: Any) -> Any:
    """The same product, behind other kernels and under another name."""
    return jnp.sort(x, 0) @ jnp.flip(w, 1), jnp.cumsum(x, 0)


def test_the_same_kernel_in_different_modules() -> None:
    args = array(64, 32), array(32, 16)
    (alone,) = set(fingerprints(product, *args).values())
    behind = fingerprints(later, *args)
    assert alone in behind.values() and len(set(behind.values())) > 1


@pytest.mark.parametrize(
    "args",
    [
        (array(64, 32), array(32, 8)),
        (array(64, 32, dtype="bfloat16"), array(32, 16, dtype="bfloat16")),
    ],
    ids=["shape", "type"],
)
def test_another_shape_or_type_is_another_kernel(args: Any) -> None:
    (first,) = set(fingerprints(product, array(64, 32), array(32, 16)).values())
    assert first not in fingerprints(product, *args).values()


def by_name(entry: str, bodies: str = "") -> dict[str, str]:
    of = read_module(module(entry, bodies))
    return {op.name: kernel_fingerprint(of, of.entry, op) for op in of.entry.ops.values()}


def test_a_fingerprint_knows_which_operands_are_one_and_what_is_fused() -> None:
    kernels = by_name(f"""
        %sum = {BIG} fusion(%a, %b), kind=kLoop, calls=%fused_add
        %again = {BIG} fusion(%b, %sum), kind=kLoop, calls=%fused_add
        %twice = {BIG} fusion(%a, %a), kind=kLoop, calls=%fused_add
        %plain = {BIG} add(%a, %b)
        ROOT %other = {BIG} multiply(%a, %b)""", ADD)  # fmt: skip
    assert kernels["sum"] == kernels["again"]
    different = [kernels[name] for name in ("sum", "twice", "plain", "other")]
    assert len(set(different)) == 4
    renamed = by_name(
        f"ROOT %s = {BIG} fusion(%b, %a), kind=kLoop, calls=%fused_else",
        ADD.replace("fused_add", "fused_else").replace("%p", "%q"),
    )
    assert renamed["s"] == kernels["sum"]


def test_what_the_autotuner_chooses_is_left_out() -> None:
    """It chooses nothing for a card that is only described."""
    call = (
        f"ROOT %c = {BIG} custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", backend_config={config}'
    )
    configs = (
        '{"gemm_backend_config":{"alpha_real":1,"selected_algorithm":"7"}}',
        '{"gemm_backend_config":{"alpha_real":1},"operation_queue_id":"3"}',
        '{"gemm_backend_config":{"alpha_real":2}}',
    )
    first, second, other = (by_name(call.replace("{config}", each))["c"] for each in configs)
    assert first == second != other


def test_a_replay_uses_the_seconds_of_known_kernels() -> None:
    args = array(64, 32), array(32, 16)
    of, by_class = compiled(later, *args), replay(compiled(later, *args), CPU)
    known = fingerprints(product, *args).values()
    device = replace(CPU, kernels=dict.fromkeys(known, 3.0))
    outcome = replay(of, device)
    (name,) = [name for name, digest in fingerprints(later, *args).items() if digest in known]
    assert outcome.seconds == {**by_class.seconds, name: 3.0}
    added_s = 3.0 - by_class.seconds[name]
    assert outcome.step_s == pytest.approx(by_class.step_s + added_s)


def test_kernels_of_loops_count_once_for_each_trip() -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda _, carry: jnp.sort(carry @ w, 0), x)

    of = compiled(step, array(64, 32), array(32, 32))
    measured = by_fingerprint(of, dict.fromkeys(of.instructions, 8.0))
    seconds = replay(of, replace(CPU, kernels=measured)).seconds
    (loop,) = [op for op in of.entry.ops.values() if op.opcode == "while"]
    in_loop = {op.name for op in of[loop.body].ops.values()} & seconds.keys()
    assert in_loop and {seconds[name] for name in in_loop} == {2.0}


def test_the_profiler_says_what_every_kernel_took() -> None:
    args = array(64, 32), array(32, 16)
    measured = seconds_of_kernels(later, args)
    assert set(measured) == set(fingerprints(later, *args).values())
    assert all(seconds > 0 for seconds in measured.values())
